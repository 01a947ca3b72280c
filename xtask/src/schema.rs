//! `cargo xtask schema`: generates the table of built-in types from published crates.
//!
//! `k8s-openapi` provides JSON names, types, required fields and descriptions; `k8s-pb` provides
//! protobuf tags and the markers in comments; `crates/schema/data/overlay.txt` provides what is in
//! neither. The result is committed, so that a build needs none of these.

mod model;
mod openapi;
mod overlay;
mod proto;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail};
use model::{Definition, Definitions};

const MANIFEST: &str = r#"[package]
name = "schema-sources"
version = "0.0.0"
edition = "2024"
[lib]
path = "lib.rs"
[dependencies]
k8s-openapi = { version = "0.29", features = ["v1_36"] }
k8s-pb = "0.9"
[workspace]
"#;

/// Packages from which all types are taken.
const PACKAGES: &[&str] = &[
    "io.k8s.api.admissionregistration.v1",
    "io.k8s.api.apps.v1",
    "io.k8s.api.authentication.v1",
    "io.k8s.api.authorization.v1",
    "io.k8s.api.autoscaling.v1",
    "io.k8s.api.autoscaling.v2",
    "io.k8s.api.batch.v1",
    "io.k8s.api.certificates.v1",
    "io.k8s.api.coordination.v1",
    "io.k8s.api.core.v1",
    "io.k8s.api.discovery.v1",
    "io.k8s.api.events.v1",
    "io.k8s.api.flowcontrol.v1",
    "io.k8s.api.networking.v1",
    "io.k8s.api.node.v1",
    "io.k8s.api.policy.v1",
    "io.k8s.api.rbac.v1",
    "io.k8s.api.resource.v1",
    "io.k8s.api.scheduling.v1",
    "io.k8s.api.storage.v1",
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1",
    "io.k8s.apimachinery.pkg.api.resource",
    "io.k8s.apimachinery.pkg.apis.meta.v1",
    "io.k8s.apimachinery.pkg.runtime",
    "io.k8s.apimachinery.pkg.util.intstr",
    "io.k8s.apimachinery.pkg.version",
    "io.k8s.kube-aggregator.pkg.apis.apiregistration.v1",
];

const HEADER: &str = "\
# Every field of every built-in type. Written by `cargo xtask schema`; change data/overlay.txt instead.
#
# package <prefix of the definition names below>
# type <name> [atomic] [union=<json>] [kind=<group>/<version>/<kind>]...
#  <field> <tag> <shape> [required] [pointer] [always] [list=atomic|set|map:<key>,<key>] [map=atomic|granular]
#      [strategy=<patch strategy>] [key=<patch merge key>] [enum=<value>,<value>, + for a space]
#      [go=<Go type>] [default=<json, to the end of the line>]
#
# A tag of 0 has no protobuf form; 2.1 is field 1 of the embedded message that is field 2. A shape is a scalar,
# the name of a type (in full when from another package), []shape for a list or {}shape for a map. `pointer`
# keeps zero values apart from absence, `always` is written even when empty; `go` is for error messages.
";

/// Generates the data files of `crates/schema`.
pub fn run(root: &Path) -> Result<()> {
    let sources = sources()?;
    let mut definitions = openapi::read(&sources.openapi.join("src/v1_36"))?;
    definitions.retain(|name, _| PACKAGES.contains(&model::package(name)));
    let packages = proto::read(&sources.proto.join("src"))?;
    packages.iter().for_each(|package| package.apply(&mut definitions));
    let data = root.join("crates/schema/data");
    let overlay = data.join("overlay.txt");
    let text = fs::read_to_string(&overlay).with_context(|| format!("cannot read {}", overlay.display()))?;
    overlay::apply(&text, &mut definitions)?;
    packages.iter().for_each(|package| package.describe(&mut definitions));
    write(&data.join("kubernetes.txt"), &table(&definitions))?;
    write(&data.join("descriptions.txt"), &descriptions(&definitions))
}

struct Sources {
    openapi: PathBuf,
    proto: PathBuf,
}

/// Downloads the two crates with cargo, using a temporary manifest outside of the workspace.
fn sources() -> Result<Sources> {
    let dir = env::temp_dir().join(format!("skiff-schema-{}", std::process::id()));
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    fs::write(dir.join("Cargo.toml"), MANIFEST)?;
    fs::write(dir.join("lib.rs"), "")?;
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version", "1", "--manifest-path"])
        .arg(dir.join("Cargo.toml"))
        .output()
        .context("cannot run cargo metadata")?;
    fs::remove_dir_all(&dir)?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let find = |name: &str| {
        let package = metadata["packages"].as_array()?.iter().find(|package| package["name"] == name)?;
        Some(Path::new(package["manifest_path"].as_str()?).parent()?.to_owned())
    };
    Ok(Sources {
        openapi: find("k8s-openapi").context("cargo metadata lists no k8s-openapi")?,
        proto: find("k8s-pb").context("cargo metadata lists no k8s-pb")?,
    })
}

fn table(definitions: &Definitions) -> String {
    let mut text = HEADER.to_owned();
    for (package, types) in by_package(definitions) {
        let structs: String =
            types.into_iter().filter(|ty| !ty.is_scalar()).map(Definition::to_text).collect();
        if !structs.is_empty() {
            let _ = write!(text, "\npackage {package}\n{structs}");
        }
    }
    text
}

/// The lines are `<definition>` or `<definition> <field>`, a tab, and the description as a JSON string.
fn descriptions(definitions: &Definitions) -> String {
    let mut text = String::from(
        "# Written by `cargo xtask schema`: what OpenAPI and `explain` say of types and fields.\n",
    );
    for (package, types) in by_package(definitions) {
        let _ = write!(text, "\npackage {package}\n");
        for definition in types {
            let _ = writeln!(text, "{}\t{}", definition.short_name(), quoted(&definition.description));
            for field in definition.fields.iter().filter(|field| !field.description.is_empty()) {
                let _ = writeln!(text, " {}\t{}", field.name, quoted(&field.description));
            }
        }
    }
    text
}

fn by_package(definitions: &Definitions) -> BTreeMap<&str, Vec<&Definition>> {
    let mut packages = BTreeMap::<&str, Vec<&Definition>>::new();
    for definition in definitions.values() {
        packages.entry(model::package(&definition.name)).or_default().push(definition);
    }
    packages
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
