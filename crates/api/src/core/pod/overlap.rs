//! Warnings about files of one volume that get into each other's way.

use serde_json::Value;

use crate::field::quoted;
use crate::json::Json;

/// A file of a volume, and the source it comes from where there are several.
#[derive(Clone, PartialEq)]
struct File {
    path: String,
    source: String,
}

pub(super) fn warnings(found: &mut Vec<String>, volumes: &[Value]) {
    for volume in volumes {
        let name = || quoted(volume.text("name"));
        for (field, shown, named) in [
            ("configMap", "ConfigMap ", "name"),
            ("secret", "Secret ", "secretName"),
            ("downwardAPI", "DownwardAPI", ""),
        ] {
            let source = volume.at(field);
            for one in clashes(files(source, "")) {
                let of = if named.is_empty() { String::new() } else { quoted(source.text(named)) };
                found.push(format!("volume {} ({shown}{of}): overlapping paths: {one}", name()));
            }
        }
        let mut all = Vec::new();
        for source in volume.at("projected").items("sources") {
            if source.as_object().is_some_and(serde_json::Map::is_empty) {
                found.push(format!("volume {} (Projected) has no sources provided", name()));
            }
            all.extend(projected(source));
        }
        for one in clashes(all) {
            found.push(format!("volume {} (Projected): overlapping paths: {one}", name()));
        }
    }
}

fn files(source: &Value, shown: &str) -> Vec<File> {
    let items = source.items("items").iter();
    items.map(|item| File { path: item.text("path").to_owned(), source: shown.to_owned() }).collect()
}

fn projected(source: &Value) -> Vec<File> {
    for (field, word) in [("configMap", "ConfigMap"), ("secret", "Secret")] {
        let from = source.at(field);
        if from.has("items") {
            return files(from, &format!("{word} {}", quoted(from.text("name"))));
        }
    }
    if source.at("downwardAPI").has("items") {
        return files(source.at("downwardAPI"), "DownwardAPI");
    }
    match source.at("serviceAccountToken") {
        Value::Null => Vec::new(),
        token => {
            vec![File { path: token.text("path").to_owned(), source: "ServiceAccountToken".to_owned() }]
        }
    }
}

/// How many files of a volume are compared: enough for people, too few to keep a server busy.
const MAX_FILES: usize = 200;

/// Every pair of files where one is the other or lies below it.
fn clashes(files: Vec<File>) -> Vec<String> {
    let mut found = Vec::new();
    let mut before: Vec<File> = Vec::new();
    for mut file in files.into_iter().take(MAX_FILES) {
        file.path.truncate(file.path.trim_end_matches('/').len());
        let below = |inner: &str, outer: &str| format!("{inner}/").starts_with(&format!("{outer}/"));
        if !file.path.is_empty() {
            let others = before.iter().filter(|other| {
                !other.path.is_empty() && (below(&other.path, &file.path) || below(&file.path, &other.path))
            });
            found.extend(others.map(|other| format!("{} with {}", shown(&file), shown(other))));
        }
        before.push(file);
    }
    found
}

fn shown(file: &File) -> String {
    let path = quoted(&file.path);
    if file.source.is_empty() { path } else { format!("{path} ({})", file.source) }
}
