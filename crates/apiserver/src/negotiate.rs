//! Content negotiation: the format of the response, from the `Accept` header.

use api::Status;
use http::HeaderMap;

use crate::request::Query;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaType {
    Json,
    Yaml,
    Protobuf,
}

/// The kind of output that the object is converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    Object,
    Table,
    /// `PartialObjectMetadata` or its list.
    Metadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    pub media: MediaType,
    pub output_kind: OutputKind,
    pub pretty: bool,
    /// The client accepts `meta.k8s.io/v1beta1` instead of `v1` (old kubectl).
    pub beta: bool,
}

pub const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

impl MediaType {
    pub fn content_type(self) -> &'static str {
        match self {
            MediaType::Json => "application/json",
            MediaType::Yaml => "application/yaml",
            MediaType::Protobuf => PROTOBUF,
        }
    }
}

impl Format {
    pub const JSON: Format =
        Format { media: MediaType::Json, output_kind: OutputKind::Object, pretty: false, beta: false };

    /// Whether the stored bytes can be sent unchanged.
    pub fn is_plain(&self) -> bool {
        self.media == MediaType::Json && self.output_kind == OutputKind::Object && !self.pretty
    }

    pub fn meta_version(&self) -> &'static str {
        if self.beta { "meta.k8s.io/v1beta1" } else { "meta.k8s.io/v1" }
    }
}

/// Selects the first supported entry, in order of decreasing `q`.
pub fn negotiate(headers: &HeaderMap, query: &Query) -> Result<Format, Status> {
    let accept = headers.get(http::header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("*/*");
    let pretty = wants_pretty(headers, query);
    let mut entries: Vec<AcceptEntry> = accept.split(',').map(AcceptEntry::parse).collect();
    entries.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    for entry in &entries {
        if let Some(mut format) = entry.format() {
            format.pretty = pretty && format.media == MediaType::Json;
            return Ok(format);
        }
    }
    Err(not_acceptable())
}

pub fn not_acceptable() -> Status {
    Status::failure(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json, application/yaml, application/vnd.kubernetes.protobuf",
    )
}

/// Browsers, curl and wget get indented JSON by default, as upstream.
fn wants_pretty(headers: &HeaderMap, query: &Query) -> bool {
    match query.get("pretty") {
        "" => {}
        text => return matches!(text, "1" | "t" | "T" | "true" | "TRUE" | "True"),
    }
    let agent = headers.get(http::header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or("");
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|prefix| agent.starts_with(prefix))
}

struct AcceptEntry<'a> {
    media: &'a str,
    as_kind: &'a str,
    group: &'a str,
    version: &'a str,
    weight: f32,
}

impl<'a> AcceptEntry<'a> {
    fn parse(text: &'a str) -> AcceptEntry<'a> {
        let mut parts = text.split(';').map(str::trim);
        let media = parts.next().unwrap_or("");
        let mut entry = AcceptEntry { media, as_kind: "", group: "", version: "", weight: 1.0 };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name.trim() {
                "as" => entry.as_kind = value,
                "g" => entry.group = value,
                "v" => entry.version = value,
                "q" => entry.weight = value.parse().unwrap_or(0.0),
                _ => {}
            }
        }
        entry
    }

    fn format(&self) -> Option<Format> {
        let media = match self.media {
            "application/json" | "*/*" | "application/*" | "" => MediaType::Json,
            "application/yaml" => MediaType::Yaml,
            PROTOBUF => MediaType::Protobuf,
            _ => return None,
        };
        let output_kind = match self.as_kind {
            "" => OutputKind::Object,
            _ if self.group != "meta.k8s.io" || !matches!(self.version, "v1" | "v1beta1") => return None,
            // Tables have no protobuf encoding: their cells can be any JSON value.
            "Table" if media != MediaType::Protobuf => OutputKind::Table,
            "PartialObjectMetadata" | "PartialObjectMetadataList" => OutputKind::Metadata,
            _ => return None,
        };
        Some(Format { media, output_kind, pretty: false, beta: self.version == "v1beta1" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(accept: &str, expected: Option<(MediaType, OutputKind)>) {
        let mut headers = HeaderMap::new();
        headers.insert("accept", accept.parse().unwrap());
        let found =
            negotiate(&headers, &Query::default()).ok().map(|format| (format.media, format.output_kind));
        assert_eq!(found, expected, "{accept}");
    }

    #[test]
    fn accept_header_is_parsed() {
        check("application/json", Some((MediaType::Json, OutputKind::Object)));
        check(
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
            Some((MediaType::Json, OutputKind::Table)),
        );
        check(
            "application/json;as=Table;v=v9;g=meta.k8s.io,application/json",
            Some((MediaType::Json, OutputKind::Object)),
        );
        check(
            "application/vnd.kubernetes.protobuf,application/json",
            Some((MediaType::Protobuf, OutputKind::Object)),
        );
        check("application/json;q=0.5,application/yaml", Some((MediaType::Yaml, OutputKind::Object)));
        check(
            "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
            Some((MediaType::Protobuf, OutputKind::Metadata)),
        );
        check("text/html,*/*;q=0.1", Some((MediaType::Json, OutputKind::Object)));
        check("text/html", None);
    }
}
