//! Images that are built for a test.

use crate::kit::TestNode;

/// A file, or a symlink if it has a target: path, content, target.
pub type Entry<'a> = (&'a str, &'a str, &'a str);

/// Imports an image with these layers, lowest first.
pub fn import(node: &TestNode, name: &str, layers: &[&[Entry<'_>]]) {
    let layers: Vec<Vec<u8>> = layers.iter().map(|entries| layer(entries)).collect();
    let archive = archive(name, &layers);
    ::image::import(node.embedded.images(), std::io::Cursor::new(archive)).expect("imported");
}

fn layer(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut layer = tar::Builder::new(Vec::new());
    for (path, content, target) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        if target.is_empty() {
            header.set_size(content.len() as u64);
            layer.append_data(&mut header, path, content.as_bytes()).unwrap();
        } else {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            layer.append_link(&mut header, path, target).unwrap();
        }
    }
    layer.into_inner().unwrap()
}

/// An archive in the format of `docker save`.
pub fn archive(name: &str, layers: &[Vec<u8>]) -> Vec<u8> {
    archive_with(name, layers, r#"{"Env":["PATH=/bin"]}"#)
}

/// Like [`archive`], with the process configuration of the image.
pub fn archive_with(name: &str, layers: &[Vec<u8>], process: &str) -> Vec<u8> {
    let quoted =
        |texts: Vec<String>| texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(",");
    let digests = quoted(layers.iter().map(|layer| ::image::Digest::of(layer).to_string()).collect());
    let files = quoted((0..layers.len()).map(|at| format!("l{at}.tar")).collect());
    let config = format!(
        r#"{{"os":"linux","architecture":"amd64","config":{process},"rootfs":{{"type":"layers","diff_ids":[{digests}]}}}}"#
    );
    let manifest = format!(r#"[{{"Config":"c.json","RepoTags":["{name}"],"Layers":[{files}]}}]"#);
    let mut archive = tar::Builder::new(Vec::new());
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, bytes).unwrap();
    };
    add("c.json", config.as_bytes());
    layers.iter().enumerate().for_each(|(at, layer)| add(&format!("l{at}.tar"), layer));
    add("manifest.json", manifest.as_bytes());
    archive.into_inner().unwrap()
}
