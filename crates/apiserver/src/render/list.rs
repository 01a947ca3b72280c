//! Encodes lists in chunks while they are sent, so that a large list is never in memory as a whole.

use std::sync::Arc;

use api::json::JsonExt as _;
use bytes::Bytes;
use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::{IncludeObject, ListMeta, OrderedJson, Renderer, build_response, list_meta, write_partial};
use crate::body::Body;
use crate::codec::to_yaml;
use crate::negotiate::{MediaType, OutputKind};
use crate::object::{Object, ObjectPosition};
use crate::registry::stored_as;

/// The size of an encoded chunk.
const CHUNK_BYTES: usize = 64 << 10;
/// How much of a protobuf list is buffered while its length is computed; the rest is encoded twice.
const MAX_BUFFERED_BYTES: usize = 8 << 20;

type Chunks = Box<dyn Iterator<Item = Bytes> + Send>;

/// The encoded text around the items.
struct ListFrame {
    head: String,
    before_first: &'static str,
    between: &'static str,
    tail: String,
    /// Replaces the tail of an empty list.
    empty_tail: String,
}

impl Renderer {
    pub async fn list(&self, mut objects: Vec<Arc<Object>>, meta: &ListMeta) -> Response<Body> {
        if self.format.output_kind == OutputKind::Table && self.resource.plural == "flowschemas" {
            // Upstream sorts only this table by something other than the name.
            objects.sort_by_cached_key(|object| object.value().at("spec").int("matchingPrecedence"));
        }
        let renderer = self.clone();
        let media = self.format.media;
        let chunks = match media {
            MediaType::Protobuf => protobuf(renderer, objects, meta).await,
            MediaType::Json if self.format.pretty => {
                chunks(self.pretty_frame(meta), objects, move |object, out| {
                    let item = renderer.item_value(object);
                    let text = serde_json::to_string_pretty(&renderer.ordered(&item)).unwrap_or_default();
                    out.extend_from_slice(text.replace('\n', "\n    ").as_bytes());
                })
            }
            MediaType::Json => {
                chunks(self.frame(meta), objects, move |object, out| renderer.write_item(object, out))
            }
            MediaType::Yaml => chunks(self.yaml_frame(meta), objects, move |object, out| {
                for (i, line) in to_yaml(&renderer.item_value(object)).lines().enumerate() {
                    let indent = if i == 0 { "- " } else { "  " };
                    out.extend_from_slice(if line.is_empty() { "" } else { indent }.as_bytes());
                    out.extend_from_slice(line.as_bytes());
                    out.push(b'\n');
                }
            }),
        };
        build_response(StatusCode::OK, media, list_body(chunks))
    }

    /// Kind and apiVersion of the list, and the name of its items field.
    fn names(&self) -> (String, String, &'static str) {
        let meta_version = self.format.meta_version().to_owned();
        match self.format.output_kind {
            OutputKind::Object => (self.resource.list_kind(), self.resource.api_version(), "items"),
            OutputKind::Metadata => ("PartialObjectMetadataList".into(), meta_version, "items"),
            OutputKind::Table => ("Table".into(), meta_version, "rows"),
        }
    }

    fn frame(&self, meta: &ListMeta) -> ListFrame {
        let (kind, api_version, items) = self.names();
        let columns = match self.format.output_kind {
            OutputKind::Table => {
                let columns = self.columns();
                format!(
                    ",\"columnDefinitions\":{}",
                    text(&OrderedJson::meta(&columns, "TableColumnDefinition"))
                )
            }
            _ => String::new(),
        };
        let metadata = list_meta(meta);
        let head = format!(
            "{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",\"metadata\":{}{columns},\"{items}\":[",
            text(&OrderedJson::meta(&metadata, "ListMeta"))
        );
        ListFrame { head, before_first: "", between: ",", tail: "]}\n".into(), empty_tail: "]}\n".into() }
    }

    fn pretty_frame(&self, meta: &ListMeta) -> ListFrame {
        let (_, _, items) = self.names();
        let before = self.without_items(meta);
        let mut head = serde_json::to_string_pretty(&OrderedJson::object(&before)).unwrap_or_default();
        head.truncate(head.len().saturating_sub("\n}".len()));
        ListFrame {
            head: format!("{head},\n  \"{items}\": ["),
            before_first: "\n    ",
            between: ",\n    ",
            tail: "\n  ]\n}\n".into(),
            empty_tail: "]\n}\n".into(),
        }
    }

    /// Keys are sorted, as in upstream's YAML.
    fn yaml_frame(&self, meta: &ListMeta) -> ListFrame {
        let (_, _, items) = self.names();
        let mut before = self.without_items(meta);
        let fields = before.as_object_mut().map(std::mem::take).unwrap_or_default();
        let (before, after): (serde_json::Map<_, _>, serde_json::Map<_, _>) =
            fields.into_iter().partition(|(name, _)| name.as_str() < items);
        let after = if after.is_empty() { String::new() } else { to_yaml(&Value::Object(after)) };
        ListFrame {
            head: format!("{}{items}:", to_yaml(&Value::Object(before))),
            before_first: "\n",
            between: "",
            empty_tail: format!(" []\n{after}"),
            tail: after,
        }
    }

    fn without_items(&self, meta: &ListMeta) -> Value {
        let (kind, api_version, _) = self.names();
        let mut list = json!({"kind": kind, "apiVersion": api_version, "metadata": list_meta(meta)});
        if self.format.output_kind == OutputKind::Table {
            list["columnDefinitions"] = self.columns();
        }
        list
    }

    fn write_item(&self, object: &Object, out: &mut Vec<u8>) {
        match self.format.output_kind {
            OutputKind::Object if self.is_stored_form() => {
                object.write_json(ObjectPosition::ListItem, object.revision, out)
            }
            OutputKind::Metadata => write_partial(self.format.meta_version(), object, object.revision, out),
            OutputKind::Table if self.include != IncludeObject::Object && self.resource.custom.is_none() => {
                self.write_row(object, out)
            }
            _ => {
                let item = self.item_value(object);
                // Writing to a Vec cannot fail.
                let _ = serde_json::to_writer(out, &self.ordered(&item));
            }
        }
    }

    /// The field order of an item that `item_value` returns.
    fn ordered<'a>(&self, item: &'a Value) -> OrderedJson<'a> {
        let row = self.resource;
        match self.format.output_kind {
            OutputKind::Table => OrderedJson::meta(item, "TableRow"),
            OutputKind::Metadata => OrderedJson::object(item),
            OutputKind::Object => OrderedJson::of_kind(item, row.group, row.version, row.kind),
        }
    }

    /// Writes the row that `row` returns, from the object's cached cells.
    fn write_row(&self, object: &Object, out: &mut Vec<u8>) {
        let stored = stored_as(self.resource);
        out.push(b'{');
        object.row(stored).write(self.now, out);
        out.extend_from_slice(b",\"object\":");
        match self.include {
            IncludeObject::Nothing => out.extend_from_slice(b"null"),
            _ => write_partial(self.format.meta_version(), object, object.revision, out),
        }
        out.push(b'}');
    }

    fn item_value(&self, object: &Object) -> Value {
        if self.format.output_kind == OutputKind::Table {
            return self.row(object.value());
        }
        let mut value = self.convert(object, object.revision);
        match self.format.output_kind {
            OutputKind::Object => {
                if let Some(fields) = value.as_object_mut() {
                    fields.remove("kind");
                    fields.remove("apiVersion");
                }
                value
            }
            _ => self.metadata_of(value),
        }
    }
}

fn text(value: &OrderedJson<'_>) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn chunks(
    frame: ListFrame,
    objects: Vec<Arc<Object>>,
    write: impl Fn(&Object, &mut Vec<u8>) + Send + 'static,
) -> Chunks {
    let mut buffer = frame.head.into_bytes();
    let mut objects = objects.into_iter();
    let mut before = frame.before_first;
    let mut tail = frame.empty_tail;
    let mut full_tail = Some(frame.tail);
    let mut done = false;
    Box::new(std::iter::from_fn(move || {
        while !done && buffer.len() < CHUNK_BYTES {
            match objects.next() {
                Some(object) => {
                    tail = full_tail.take().unwrap_or_else(|| std::mem::take(&mut tail));
                    buffer.extend_from_slice(before.as_bytes());
                    before = frame.between;
                    write(&object, &mut buffer);
                }
                None => {
                    buffer.extend_from_slice(tail.as_bytes());
                    done = true;
                }
            }
        }
        let capacity = if done { 0 } else { CHUNK_BYTES + CHUNK_BYTES / 4 };
        let chunk = std::mem::replace(&mut buffer, Vec::with_capacity(capacity));
        (!chunk.is_empty()).then(|| chunk.into())
    }))
}

/// A short list is sent as a whole with a Content-Length; only a long one is worth streaming and
/// compressing.
fn list_body(mut chunks: Chunks) -> Body {
    let mut first: Vec<Bytes> = Vec::new();
    while first.iter().map(Bytes::len).sum::<usize>() < crate::server::MIN_GZIP_BYTES {
        match chunks.next() {
            Some(chunk) => first.push(chunk),
            None => return first.concat().into(),
        }
    }
    Body::Chunks(Box::new(first.into_iter().chain(chunks)))
}

/// The protobuf envelope contains the length of the list before the list, so the list is encoded to
/// determine it. The result is buffered up to `MAX_BUFFERED_BYTES`; the rest is encoded again while
/// it is sent.
async fn protobuf(renderer: Renderer, mut objects: Vec<Arc<Object>>, meta: &ListMeta) -> Chunks {
    let table = schema::kubernetes();
    let (kind, api_version, _) = renderer.names();
    let row = renderer.resource;
    let item = match renderer.format.output_kind {
        OutputKind::Metadata => table.type_by_name(&format!("{META}.PartialObjectMetadata")),
        _ => table.type_by_kind(row.group, row.version, row.kind),
    };
    let write = move |object: &Object, out: &mut Vec<u8>| {
        let value = renderer.item_value(object);
        let message = item.map(|ty| schema::protobuf::to_protobuf(table, ty, &value));
        write_field(2, &message.unwrap_or_default(), out);
    };
    let mut buffer = Vec::with_capacity(CHUNK_BYTES);
    if let Some(ty) = table.type_by_name(&format!("{META}.ListMeta")) {
        write_field(1, &schema::protobuf::to_protobuf(table, ty, &list_meta(meta)), &mut buffer);
    }
    let mut buffered: Vec<Bytes> = Vec::new();
    let mut buffered_objects = 0;
    let mut length = 0;
    for (i, object) in objects.iter().enumerate() {
        write(object, &mut buffer);
        let last = i + 1 == objects.len();
        if buffer.len() >= CHUNK_BYTES || last {
            length += buffer.len();
            if length <= MAX_BUFFERED_BYTES {
                buffered.push(Bytes::copy_from_slice(&buffer));
                buffered_objects = i + 1;
            }
            buffer.clear();
            // Encoding may take long: yield to other tasks.
            tokio::task::yield_now().await;
        }
    }
    if objects.is_empty() {
        length = buffer.len();
        buffered.push(buffer.into());
    }
    let rest = objects.split_off(buffered_objects);
    let (head, tail) = envelope(&api_version, &kind, length);
    let frame =
        ListFrame { head: String::new(), before_first: "", between: "", empty_tail: tail.clone(), tail };
    Box::new(std::iter::once(head).chain(buffered).chain(chunks(frame, rest, write)))
}

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// The envelope's bytes before and after a message of `length` bytes.
fn envelope(api_version: &str, kind: &str, length: usize) -> (Bytes, String) {
    // The trailer after the length: two empty fields of two bytes each. `head.pop()` removes the
    // zero length of the empty message.
    const TRAILER_BYTES: usize = 4;
    let mut head = schema::protobuf::encode_envelope(api_version, kind, b"");
    let tail = head.split_off(head.len().saturating_sub(TRAILER_BYTES));
    head.pop();
    write_varint(length, &mut head);
    (head.into(), String::from_utf8_lossy(&tail).into_owned())
}

fn write_field(number: u8, message: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | 2);
    write_varint(message.len(), out);
    out.extend_from_slice(message);
}

fn write_varint(mut value: usize, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use http_body_util::BodyExt as _;
    use jiff::Timestamp;

    use super::*;
    use crate::negotiate::Format;
    use crate::object::to_stored;
    use crate::registry::Registry;

    fn renderer(plural: &str, format: Format) -> Renderer {
        let resource = Registry::new(&[]).unwrap().find("", "v1", plural).unwrap();
        Renderer { resource, format, include: IncludeObject::Metadata, now: Timestamp::UNIX_EPOCH }
    }

    fn objects(count: usize, padding: usize) -> Vec<Arc<Object>> {
        let object = |i: usize| {
            let value = json!({
                "kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": format!("m{i}"), "namespace": "ns"},
                "data": {"text": "x\ny: z".repeat(padding)},
            });
            let key = format!("/registry/configmaps/ns/m{i}");
            Arc::new(Object::new(key.into(), to_stored(value), 5 + i as u64).unwrap())
        };
        (0..count).map(object).collect()
    }

    async fn bytes(renderer: &Renderer, objects: Vec<Arc<Object>>) -> Vec<u8> {
        let meta = ListMeta { revision: 9, ..ListMeta::default() };
        renderer.list(objects, &meta).await.into_body().collect().await.unwrap().to_bytes().to_vec()
    }

    async fn check(format: Format, count: usize, expected: Expect) {
        let text =
            String::from_utf8(bytes(&renderer("configmaps", format), objects(count, 1)).await).unwrap();
        expected.assert_eq(&text);
        match format.media {
            MediaType::Yaml => drop(serde_saphyr::from_str::<Value>(&text).unwrap()),
            _ => drop(serde_json::from_str::<Value>(&text).unwrap()),
        }
    }

    const PRETTY: Format = Format { pretty: true, ..Format::JSON };
    const YAML: Format = Format { media: MediaType::Yaml, ..Format::JSON };
    const PROTOBUF: Format = Format { media: MediaType::Protobuf, ..Format::JSON };

    #[tokio::test]
    async fn encodes_lists_in_each_format() {
        check(
            Format::JSON,
            0,
            expect![[r#"
            {"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[]}
        "#]],
        )
        .await;
        check(Format::JSON, 2, expect![[r#"
            {"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[{"metadata":{"resourceVersion":"5","name":"m0","namespace":"ns"},"data":{"text":"x\ny: z"}},{"metadata":{"resourceVersion":"6","name":"m1","namespace":"ns"},"data":{"text":"x\ny: z"}}]}
        "#]]).await;
        check(Format { output_kind: OutputKind::Metadata, ..Format::JSON }, 1, expect![[r#"
            {"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"9"},"items":[{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"5","name":"m0","namespace":"ns"}}]}
        "#]]).await;
        check(
            PRETTY,
            0,
            expect![[r#"
            {
              "kind": "ConfigMapList",
              "apiVersion": "v1",
              "metadata": {
                "resourceVersion": "9"
              },
              "items": []
            }
        "#]],
        )
        .await;
        check(
            PRETTY,
            2,
            expect![[r#"
                {
                  "kind": "ConfigMapList",
                  "apiVersion": "v1",
                  "metadata": {
                    "resourceVersion": "9"
                  },
                  "items": [
                    {
                      "metadata": {
                        "name": "m0",
                        "namespace": "ns",
                        "resourceVersion": "5"
                      },
                      "data": {
                        "text": "x\ny: z"
                      }
                    },
                    {
                      "metadata": {
                        "name": "m1",
                        "namespace": "ns",
                        "resourceVersion": "6"
                      },
                      "data": {
                        "text": "x\ny: z"
                      }
                    }
                  ]
                }
            "#]],
        )
        .await;
        check(
            YAML,
            0,
            expect![[r#"
            apiVersion: v1
            items: []
            kind: ConfigMapList
            metadata:
              resourceVersion: "9"
        "#]],
        )
        .await;
        check(
            YAML,
            2,
            expect![[r#"
                apiVersion: v1
                items:
                - data:
                    text: |-
                      x
                      y: z
                  metadata:
                    name: m0
                    namespace: ns
                    resourceVersion: "5"
                - data:
                    text: |-
                      x
                      y: z
                  metadata:
                    name: m1
                    namespace: ns
                    resourceVersion: "6"
                kind: ConfigMapList
                metadata:
                  resourceVersion: "9"
            "#]],
        )
        .await;
    }

    #[tokio::test]
    async fn v1beta1_tables_use_v1beta1_kinds() {
        let format = Format { output_kind: OutputKind::Table, beta: true, ..Format::JSON };
        let list = bytes(&renderer("configmaps", format), objects(1, 1)).await;
        let list: Value = serde_json::from_slice(&list).unwrap();
        assert_eq!((list.text("kind"), list.text("apiVersion")), ("Table", "meta.k8s.io/v1beta1"));
        let row = &list.items("rows")[0];
        assert_eq!(list.items("columnDefinitions").len(), row.items("cells").len());
        assert_eq!(row.at("object").text("apiVersion"), "meta.k8s.io/v1beta1");
    }

    #[test]
    fn written_row_matches_decoded_row() {
        for include in [IncludeObject::Metadata, IncludeObject::Nothing] {
            let format = Format { output_kind: OutputKind::Table, ..Format::JSON };
            let renderer = Renderer { include, ..renderer("configmaps", format) };
            let object = &objects(1, 1)[0];
            let mut row = Vec::new();
            renderer.write_row(object, &mut row);
            assert_eq!(serde_json::from_slice::<Value>(&row).unwrap(), renderer.row(object.value()));
        }
    }

    #[tokio::test]
    async fn short_lists_are_not_chunked() {
        let meta = ListMeta::default();
        for (count, expected) in [(0, true), (3, true), (300, false)] {
            let response = renderer("configmaps", Format::JSON).list(objects(count, 100), &meta).await;
            assert_eq!(response.body().size().is_some(), expected, "{count}");
        }
    }

    #[tokio::test]
    async fn flow_schema_tables_are_sorted_by_precedence() {
        let resource =
            api::resource_table::find_resource("flowcontrol.apiserver.k8s.io", "v1", "flowschemas").unwrap();
        let format = Format { output_kind: OutputKind::Table, ..Format::JSON };
        let renderer = Renderer { resource, ..renderer("configmaps", format) };
        let schema = |name: &str, precedence: i64| {
            let value = json!({
                "kind": "FlowSchema", "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
                "metadata": {"name": name}, "spec": {"matchingPrecedence": precedence},
            });
            Arc::new(Object::new(name.into(), to_stored(value), 1).unwrap())
        };
        let list = bytes(&renderer, vec![schema("a", 9), schema("b", 1), schema("c", 1)]).await;
        let list: Value = serde_json::from_slice(&list).unwrap();
        let names: Vec<_> = list.items("rows").iter().map(|row| row["cells"][0].clone()).collect();
        assert_eq!(names, ["b", "c", "a"]);
    }

    /// Lists below and above the buffer limit match a single encoding of the whole list.
    #[tokio::test]
    async fn protobuf_lists_match_single_encoding() {
        let table = schema::kubernetes();
        for (count, padding) in [(0, 1), (1, 1), (3, 20_000), (200, 10_000)] {
            let renderer = renderer("configmaps", PROTOBUF);
            let items: Vec<Value> = objects(count, padding).iter().map(|o| renderer.item_value(o)).collect();
            let list = json!({"metadata": {"resourceVersion": "9"}, "items": items});
            let ty = table.type_by_kind("", "v1", "ConfigMapList").unwrap();
            let whole = schema::protobuf::to_protobuf(table, ty, &list);
            let sealed = schema::protobuf::encode_envelope("v1", "ConfigMapList", &whole);
            assert!(bytes(&renderer, objects(count, padding)).await == sealed, "{count} items");
        }
    }
}
