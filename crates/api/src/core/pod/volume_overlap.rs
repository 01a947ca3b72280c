//! Warnings about conflicting file paths in a volume.

use serde_json::Value;

use crate::field::quote;
use crate::json::JsonExt;

/// A file in a volume, with its source if the volume has several.
#[derive(Clone, PartialEq)]
struct ProjectedFile {
    path: String,
    source: String,
}

pub(super) fn warnings(found: &mut Vec<String>, volumes: &[Value]) {
    for volume in volumes {
        let name = || quote(volume.text("name"));
        for (field, source_name, named) in [
            ("configMap", "ConfigMap ", "name"),
            ("secret", "Secret ", "secretName"),
            ("downwardAPI", "DownwardAPI", ""),
        ] {
            let source = volume.at(field);
            for one in find_conflicts(files(source, "")) {
                let of = if named.is_empty() { String::new() } else { quote(source.text(named)) };
                found.push(format!("volume {} ({source_name}{of}): overlapping paths: {one}", name()));
            }
        }
        let mut all = Vec::new();
        for source in volume.at("projected").items("sources") {
            if source.as_object().is_some_and(serde_json::Map::is_empty) {
                found.push(format!("volume {} (Projected) has no sources provided", name()));
            }
            all.extend(projected(source));
        }
        for one in find_conflicts(all) {
            found.push(format!("volume {} (Projected): overlapping paths: {one}", name()));
        }
    }
}

fn files(source: &Value, source_name: &str) -> Vec<ProjectedFile> {
    let items = source.items("items").iter();
    items
        .map(|item| ProjectedFile { path: item.text("path").to_owned(), source: source_name.to_owned() })
        .collect()
}

fn projected(source: &Value) -> Vec<ProjectedFile> {
    for (field, word) in [("configMap", "ConfigMap"), ("secret", "Secret")] {
        let from = source.at(field);
        if from.has("items") {
            return files(from, &format!("{word} {}", quote(from.text("name"))));
        }
    }
    if source.at("downwardAPI").has("items") {
        return files(source.at("downwardAPI"), "DownwardAPI");
    }
    match source.at("serviceAccountToken") {
        Value::Null => Vec::new(),
        token => {
            vec![ProjectedFile {
                path: token.text("path").to_owned(),
                source: "ServiceAccountToken".to_owned(),
            }]
        }
    }
}

/// The maximum number of compared files. The comparison is quadratic.
const MAX_CHECKED_FILES: usize = 200;

/// Returns all pairs of files with equal paths or where one path is below the other.
fn find_conflicts(files: Vec<ProjectedFile>) -> Vec<String> {
    let mut found = Vec::new();
    let mut before: Vec<ProjectedFile> = Vec::new();
    for mut file in files.into_iter().take(MAX_CHECKED_FILES) {
        file.path.truncate(file.path.trim_end_matches('/').len());
        let below = |inner: &str, outer: &str| format!("{inner}/").starts_with(&format!("{outer}/"));
        if !file.path.is_empty() {
            let others = before.iter().filter(|other| {
                !other.path.is_empty() && (below(&other.path, &file.path) || below(&file.path, &other.path))
            });
            found.extend(
                others.map(|other| format!("{} with {}", describe_file(&file), describe_file(other))),
            );
        }
        before.push(file);
    }
    found
}

fn describe_file(file: &ProjectedFile) -> String {
    let path = quote(&file.path);
    if file.source.is_empty() { path } else { format!("{path} ({})", file.source) }
}
