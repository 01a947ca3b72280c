//! Manifests, indexes and configurations of images. The OCI and docker formats differ only in their
//! media types.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;

use serde::{Deserialize, Serialize};

use crate::{Digest, Error, file_error};

pub const MEDIA_TYPE_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const MEDIA_TYPE_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const MEDIA_TYPE_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const MEDIA_TYPE_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The maximum size of a manifest, index or configuration. They are read into memory.
pub const MAX_DOCUMENT_BYTES: u64 = 8 << 20;
/// The annotation with the full image name, as containerd writes it into the index of an archive.
pub const ANNOTATION_IMAGE_NAME: &str = "io.containerd.image.name";
pub const ANNOTATION_REF_NAME: &str = "org.opencontainers.image.ref.name";

/// An OCI content descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default, deserialize_with = "null_is_default")]
    pub media_type: String,
    pub digest: Digest,
    #[serde(default, deserialize_with = "null_is_default")]
    pub size: u64,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    #[serde(default, deserialize_with = "null_is_default")]
    pub os: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub architecture: String,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "String::is_empty")]
    pub variant: String,
}

/// An image manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub schema_version: u32,
    #[serde(default, deserialize_with = "null_is_default")]
    pub media_type: String,
    pub config: Descriptor,
    #[serde(default, deserialize_with = "null_is_default")]
    pub layers: Vec<Descriptor>,
}

/// An image index: manifests for several platforms, or several images of an archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    pub schema_version: u32,
    #[serde(default, deserialize_with = "null_is_default")]
    pub media_type: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub manifests: Vec<Descriptor>,
}

/// An image configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ImageConfig {
    #[serde(default, deserialize_with = "null_is_default")]
    pub config: ImageProcess,
    #[serde(default, deserialize_with = "null_is_default")]
    pub rootfs: RootFs,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct RootFs {
    /// The digests of the uncompressed layers, lowest first.
    #[serde(default, deserialize_with = "null_is_default")]
    pub diff_ids: Vec<Digest>,
}

/// The execution parameters in an image configuration. Every field may be null.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageProcess {
    #[serde(deserialize_with = "null_is_default")]
    pub user: String,
    pub env: Option<Vec<String>>,
    pub entrypoint: Option<Vec<String>>,
    pub cmd: Option<Vec<String>>,
    #[serde(deserialize_with = "null_is_default")]
    pub working_dir: String,
    #[serde(deserialize_with = "null_is_default")]
    pub stop_signal: String,
    pub volumes: Option<BTreeMap<String, serde_json::Value>>,
}

/// An entry of `manifest.json` in an archive of `docker save`. The paths are relative to the
/// archive root.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DockerManifest {
    pub config: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub repo_tags: Option<Vec<String>>,
    pub layers: Vec<String>,
}

/// A manifest or an index. An index is recognized by its `manifests` field, because media types may
/// be missing.
pub enum Document {
    Manifest(Manifest),
    Index(Index),
}

impl Document {
    pub fn parse(what: &str, bytes: &[u8]) -> Result<Document, Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct DocumentProbe {
            schema_version: Option<u32>,
            manifests: Option<serde::de::IgnoredAny>,
        }
        let probe: DocumentProbe = parse(what, bytes)?;
        if probe.schema_version == Some(1) {
            let reason = "manifest schema version 1 is not supported: rebuild the image or push it again";
            return Err(Error::Unusable { what: what.to_owned(), reason: reason.to_owned() });
        }
        Ok(match probe.manifests {
            Some(_) => Document::Index(parse(what, bytes)?),
            None => Document::Manifest(parse(what, bytes)?),
        })
    }
}

impl Index {
    /// Selects the manifest that matches the platform of this host best. If no entry matches, the
    /// first entry without a platform is used.
    pub fn select_platform(&self, what: &str) -> Result<&Descriptor, Error> {
        let rank = |entry: &Descriptor| entry.platform.as_ref().and_then(Platform::platform_rank);
        let found = self.manifests.iter().filter(|entry| rank(entry).is_some());
        let found = found.min_by_key(|entry| std::cmp::Reverse(rank(entry)));
        let only = || self.manifests.iter().find(|entry| entry.platform.is_none());
        found.or_else(only).ok_or_else(|| Error::NoPlatform { what: what.to_owned() })
    }
}

impl Platform {
    /// How well the platform matches this host. `None` if it does not run here.
    pub fn platform_rank(&self) -> Option<u8> {
        let matches_host = self.os == "linux" && self.architecture == architecture();
        matches_host.then(|| variant_rank(&self.architecture, &self.variant)).flatten()
    }
}

/// Ranks variants as containerd does. Variants above the baseline (such as amd64/v2) are not
/// selected, because the processor may not support them.
fn variant_rank(architecture: &str, variant: &str) -> Option<u8> {
    match (architecture, variant) {
        ("amd64", "" | "v1") | ("arm64", "" | "v8") | ("arm", "" | "v7") => Some(7),
        ("arm", "v6") => Some(6),
        ("arm", "v5") => Some(5),
        ("amd64" | "arm64" | "arm", _) => None,
        _ => Some(0),
    }
}

/// Go programs do not distinguish between an absent field and null, and write either.
fn null_is_default<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Reads a document of up to [`MAX_DOCUMENT_BYTES`].
pub fn read(what: &str, file: File) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    file.take(MAX_DOCUMENT_BYTES + 1).read_to_end(&mut bytes).map_err(file_error("read", what))?;
    if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
        let reason = format!("it is larger than {MAX_DOCUMENT_BYTES} bytes");
        return Err(Error::Unusable { what: what.to_owned(), reason });
    }
    Ok(bytes)
}

pub fn parse<T: serde::de::DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|source| Error::Malformed { what: what.to_owned(), source })
}

/// The GOARCH name of this host's architecture, as used in image platforms.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        "riscv64" => "riscv64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_fields_use_defaults() {
        let config: ImageConfig = parse("", br#"{"config": null, "rootfs": null}"#).unwrap();
        assert_eq!(config, ImageConfig::default());
        let process =
            r#"{"User": null, "Env": null, "WorkingDir": null, "StopSignal": null, "Volumes": null}"#;
        for rootfs in ["{}", r#"{"diff_ids": null}"#] {
            let text = format!(r#"{{"config": {process}, "rootfs": {rootfs}}}"#);
            assert_eq!(parse::<ImageConfig>("", text.as_bytes()).unwrap(), config);
        }
        let digest = Digest::of(b"");
        let manifest = format!(
            r#"{{"schemaVersion": 2, "mediaType": null, "layers": null,
                "config": {{"digest": "{digest}", "size": null, "annotations": null, "platform": null}}}}"#
        );
        let Ok(Document::Manifest(manifest)) = Document::parse("", manifest.as_bytes()) else { panic!() };
        assert!(manifest.layers.is_empty() && manifest.config.digest == digest);
    }

    #[test]
    fn rejects_schema_version_one() {
        let error = Document::parse("a:v1", br#"{"schemaVersion": 1, "fsLayers": []}"#).err().unwrap();
        let expected = "a:v1 cannot be used: manifest schema version 1 is not supported: \
            rebuild the image or push it again";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn select_the_best_matching_platform() {
        let entry = |(os, architecture, variant): (&str, &str, &str)| {
            let platform = serde_json::json!({"os": os, "architecture": architecture, "variant": variant});
            serde_json::json!({"digest": Digest::of(variant.as_bytes()), "platform": platform})
        };
        let choose = |platforms: &[(&str, &str, &str)]| {
            let entries: Vec<_> = platforms.iter().copied().map(entry).collect();
            let index = serde_json::json!({"schemaVersion": 2, "manifests": entries});
            let index: Index = serde_json::from_value(index).unwrap();
            index
                .select_platform("x")
                .ok()
                .and_then(|entry| entry.platform.clone())
                .map(|platform| platform.variant)
        };
        let host_arch = architecture();
        let unknown_variant = ("linux", host_arch, "v99");
        assert_eq!(
            choose(&[("windows", host_arch, "w"), unknown_variant, ("linux", host_arch, "")]).as_deref(),
            Some("")
        );
        if ["amd64", "arm64", "arm"].contains(&host_arch) {
            assert_eq!(choose(&[unknown_variant, ("unknown", "unknown", "")]), None);
        }
        let best = ["v8", "v5", "v6", "v7"].map(|variant| variant_rank("arm", variant));
        assert_eq!(best, [None, Some(5), Some(6), Some(7)]);
        assert_eq!(
            ["", "v1", "v2"].map(|variant| variant_rank("amd64", variant).is_some()),
            [true, true, false]
        );
        assert_eq!(
            ["", "v8", "v9"].map(|variant| variant_rank("arm64", variant).is_some()),
            [true, true, false]
        );
        assert!(variant_rank("riscv64", "rva22u64").is_some());
    }
}
