//! In which form a client wants its answer, from the `Accept` header.

use api::Status;
use http::HeaderMap;

use crate::request::Query;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media {
    Json,
    Yaml,
    Protobuf,
}

/// What an object is turned into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Object,
    Table,
    /// `PartialObjectMetadata` or its list.
    Metadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    pub media: Media,
    pub form: Form,
    pub pretty: bool,
    /// `meta.k8s.io/v1beta1` was asked for instead of `v1` (old kubectl).
    pub beta: bool,
}

pub const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

impl Media {
    pub fn content_type(self) -> &'static str {
        match self {
            Media::Json => "application/json",
            Media::Yaml => "application/yaml",
            Media::Protobuf => PROTOBUF,
        }
    }
}

impl Format {
    pub const JSON: Format = Format { media: Media::Json, form: Form::Object, pretty: false, beta: false };

    /// The stored bytes can be handed out as they are.
    pub fn is_plain(&self) -> bool {
        self.media == Media::Json && self.form == Form::Object && !self.pretty
    }

    pub fn meta_version(&self) -> &'static str {
        if self.beta { "meta.k8s.io/v1beta1" } else { "meta.k8s.io/v1" }
    }
}

/// The first acceptable clause wins; clauses with a lower `q` come later.
pub fn negotiate(headers: &HeaderMap, query: &Query) -> Result<Format, Status> {
    let accept = headers.get(http::header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("*/*");
    let pretty = wants_pretty(headers, query);
    let mut clauses: Vec<Clause> = accept.split(',').map(Clause::parse).collect();
    clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality));
    for clause in &clauses {
        if let Some(mut format) = clause.format() {
            format.pretty = pretty && format.media == Media::Json;
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

/// People with a browser or curl get indented JSON.
fn wants_pretty(headers: &HeaderMap, query: &Query) -> bool {
    match query.get("pretty") {
        "" => {}
        text => return matches!(text, "1" | "t" | "T" | "true" | "TRUE" | "True"),
    }
    let agent = headers.get(http::header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or("");
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|prefix| agent.starts_with(prefix))
}

struct Clause<'a> {
    media: &'a str,
    as_kind: &'a str,
    group: &'a str,
    version: &'a str,
    quality: f32,
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Clause<'a> {
        let mut parts = text.split(';').map(str::trim);
        let media = parts.next().unwrap_or("");
        let mut clause = Clause { media, as_kind: "", group: "", version: "", quality: 1.0 };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name.trim() {
                "as" => clause.as_kind = value,
                "g" => clause.group = value,
                "v" => clause.version = value,
                "q" => clause.quality = value.parse().unwrap_or(0.0),
                _ => {}
            }
        }
        clause
    }

    fn format(&self) -> Option<Format> {
        let media = match self.media {
            "application/json" | "*/*" | "application/*" | "" => Media::Json,
            "application/yaml" => Media::Yaml,
            PROTOBUF => Media::Protobuf,
            _ => return None,
        };
        let form = match self.as_kind {
            "" => Form::Object,
            _ if self.group != "meta.k8s.io" || !matches!(self.version, "v1" | "v1beta1") => return None,
            // Tables exist in JSON only: their cells can be anything.
            "Table" if media != Media::Protobuf => Form::Table,
            "PartialObjectMetadata" | "PartialObjectMetadataList" => Form::Metadata,
            _ => return None,
        };
        Some(Format { media, form, pretty: false, beta: self.version == "v1beta1" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(accept: &str, expected: Option<(Media, Form)>) {
        let mut headers = HeaderMap::new();
        headers.insert("accept", accept.parse().unwrap());
        let found = negotiate(&headers, &Query::default()).ok().map(|format| (format.media, format.form));
        assert_eq!(found, expected, "{accept}");
    }

    #[test]
    fn accept_headers() {
        check("application/json", Some((Media::Json, Form::Object)));
        check(
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
            Some((Media::Json, Form::Table)),
        );
        check(
            "application/json;as=Table;v=v9;g=meta.k8s.io,application/json",
            Some((Media::Json, Form::Object)),
        );
        check("application/vnd.kubernetes.protobuf,application/json", Some((Media::Protobuf, Form::Object)));
        check("application/json;q=0.5,application/yaml", Some((Media::Yaml, Form::Object)));
        check(
            "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
            Some((Media::Protobuf, Form::Metadata)),
        );
        check("text/html,*/*;q=0.1", Some((Media::Json, Form::Object)));
        check("text/html", None);
    }
}
