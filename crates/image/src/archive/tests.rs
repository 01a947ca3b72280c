use std::collections::BTreeSet;

use super::*;

fn layer() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    append(&mut builder, "etc/motd", 5, &mut &b"hello"[..]).unwrap();
    builder.into_inner().unwrap()
}

/// An archive in the format of `docker save`.
fn docker_archive(diff: &Digest) -> Vec<u8> {
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["sh"], "Env": null, "User": "7:8"},
        "rootfs": {"type": "layers", "diff_ids": [diff.to_string()]},
    });
    let list = serde_json::json!([{"Config": "c.json", "RepoTags": ["app:v1", "app:v2"], "Layers": ["x/layer.tar"]}]);
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in [
        ("c.json", config.to_string().into_bytes()),
        ("x/layer.tar", layer()),
        ("manifest.json", list.to_string().into_bytes()),
    ] {
        append(&mut builder, name, bytes.len() as u64, &mut &bytes[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn import_export_and_remove_images() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("one")).unwrap();
    let images = import(&store, io::Cursor::new(docker_archive(&Digest::of(&layer())))).unwrap();
    let [image] = &images[..] else { panic!("{images:?}") };
    let tags: Vec<_> = image.tags.iter().map(String::as_str).collect();
    assert_eq!(tags, ["docker.io/library/app:v1", "docker.io/library/app:v2"]);
    assert_eq!(store.config(image).unwrap().config.user, "7:8");
    let file = store.layer(&image.layers[0]).join("etc/motd");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "hello");
    let (id, hex) = (image.id.to_string(), image.id.hex());
    for name in ["app:v1", "docker.io/library/app:v2", &id, hex, &hex[..12], &id[..20]] {
        assert_eq!(store.find(name).unwrap().as_ref(), Some(image), "{name}");
    }
    // Too short, and unknown.
    for name in [&hex[..11], "sha256:", "", "000000000000"] {
        assert_eq!(store.find(name).unwrap(), None, "{name}");
    }

    let mut archive = Vec::new();
    export(&store, &["app:v1".to_owned()], &mut archive).unwrap();
    let other = Store::open(&directory.path().join("two")).unwrap();
    assert_eq!(import(&other, io::Cursor::new(archive)).unwrap(), images);

    assert!(store.remove("app:v1").unwrap() && store.find("app:v2").unwrap().is_some());
    assert!(store.remove("app:v2").unwrap() && !store.remove("app:v2").unwrap());
    assert_eq!(store.images().unwrap(), []);
    store.collect_garbage(|| Ok(image.layers.iter().cloned().collect()), |_, _| false).unwrap();
    assert!(store.layer(&image.layers[0]).exists());
    store.collect_garbage(no_layers_in_use, |_, _| false).unwrap();
    let left = |name: &str| std::fs::read_dir(store.root().join(name)).unwrap().count();
    assert_eq!((left("blobs"), left("layers"), left("tmp")), (0, 0, 0));
}

#[test]
fn invalid_archive_leaves_the_store_unchanged() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let wrong = docker_archive(&Digest::of(b"another layer"));
    let error = import(&store, io::Cursor::new(wrong.clone())).unwrap_err();
    assert!(matches!(error, Error::WrongDigest { .. }), "{error}");
    let cut = import(&store, io::Cursor::new(wrong[..wrong.len() / 2].to_vec()));
    assert!(cut.is_err());
    let empty = import(&store, io::Cursor::new(Vec::new())).unwrap_err();
    assert_eq!(empty.to_string(), "the archive has no image: it needs an index.json or a manifest.json");
    assert_eq!(store.images().unwrap(), []);
    assert_eq!(std::fs::read_dir(directory.path().join("layers")).unwrap().count(), 0);
}

/// The same archive with a changed index.
fn with_index(archive: &[u8], change: impl Fn(&mut Vec<serde_json::Value>)) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for entry in tar::Archive::new(archive).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        if name == "index.json" {
            let mut index: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            change(index["manifests"].as_array_mut().unwrap());
            bytes = index.to_string().into_bytes();
        }
        append(&mut builder, &name, bytes.len() as u64, &mut &bytes[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn ignores_manifests_of_another_platform() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let (name, archive) = small_image("app");
    let image = import(&store, io::Cursor::new(archive)).unwrap().remove(0);
    let mut archive = Vec::new();
    export(&store, &[name], &mut archive).unwrap();
    let others = |entries: &mut Vec<serde_json::Value>| {
        for (os, architecture) in [("linux", "z80"), ("unknown", "unknown")] {
            // The blobs of the other platforms are not in the archive.
            let mut other = entries[0].clone();
            other["digest"] = Digest::of(os.as_bytes()).to_string().into();
            other["platform"] = serde_json::json!({"os": os, "architecture": architecture});
            entries.push(other);
        }
    };
    let with_others = with_index(&archive, others);
    assert_eq!(import(&store, io::Cursor::new(with_others)).unwrap(), [image]);
    let only_others = with_index(&archive, |entries| {
        others(entries);
        entries.remove(0);
    });
    let error = import(&store, io::Cursor::new(only_others)).unwrap_err();
    assert!(matches!(error, Error::NoPlatform { .. }), "{error}");
}

/// The format of `docker save` before version 25, with the entries in any order.
#[test]
fn resolves_layer_links_to_later_entries() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let layer = layer();
    let diff_ids = vec![Digest::of(&layer).to_string(); 3];
    let config = serde_json::json!({"rootfs": {"diff_ids": diff_ids}}).to_string();
    let layers = ["aaa/layer.tar", "ccc/layer.tar", "ddd/layer.tar"];
    let list = serde_json::json!([{"Config": "c.json", "RepoTags": [], "Layers": layers}]).to_string();
    let archive = |target: &str| {
        let mut builder = tar::Builder::new(Vec::new());
        let mut link = |kind, name: &str, target: &str| {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(kind);
            header.set_size(0);
            builder.append_link(&mut header, name, target).unwrap();
        };
        link(tar::EntryType::Symlink, "aaa/layer.tar", "../ccc/layer.tar");
        link(tar::EntryType::Symlink, "ccc/layer.tar", target);
        link(tar::EntryType::Link, "ddd/layer.tar", "bbb/layer.tar");
        for (name, bytes) in
            [("c.json", config.as_bytes()), ("bbb/layer.tar", &layer), ("manifest.json", list.as_bytes())]
        {
            append(&mut builder, name, bytes.len() as u64, &mut &bytes[..]).unwrap();
        }
        io::Cursor::new(builder.into_inner().unwrap())
    };
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    assert_eq!(import(&store, archive("../bbb/layer.tar")).unwrap()[0].layers.len(), 3);
    let error = import(&store, archive("../aaa/layer.tar")).unwrap_err();
    assert_eq!(error.to_string(), "file missing in the archive: aaa/layer.tar");
}

#[test]
fn export_reports_a_full_disk() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    // All of it fits into the buffer, so the error only appears when it is flushed.
    let full = io::BufWriter::with_capacity(1 << 20, File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(export(&store, &[], full).unwrap_err().to_string(), "cannot write the archive");
}

#[test]
fn rejects_documents_above_the_size_limit() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let large = vec![b' '; manifest::MAX_DOCUMENT_BYTES as usize + 1];
    let list = br#"[{"Config": "c.json", "RepoTags": [], "Layers": []}]"#;
    for (files, expected) in [
        (vec![("index.json", &large[..])], "index.json"),
        (vec![("manifest.json", &large)], "manifest.json"),
        (vec![("manifest.json", list), ("c.json", &large)], &Digest::of(&large).to_string()),
    ] {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, bytes) in files {
            append(&mut builder, name, bytes.len() as u64, &mut &bytes[..]).unwrap();
        }
        let error = import(&store, io::Cursor::new(builder.into_inner().unwrap())).unwrap_err();
        assert_eq!(error.to_string(), format!("{expected} cannot be used: it is larger than 8388608 bytes"));
    }
}

#[test]
fn tag_names_one_image() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let old = import(&store, io::Cursor::new(docker_archive(&Digest::of(&layer())))).unwrap().remove(0);
    // The same name for another image: the configuration differs.
    let mut bytes = Vec::new();
    export(&store, &["app:v1".to_owned()], &mut bytes).unwrap();
    store.tag(&old.id, &Reference::parse("third").unwrap()).unwrap();
    assert_eq!(store.find("third").unwrap().unwrap().id, old.id);
    assert!(store.remove("third").unwrap());
    assert_eq!(store.find("app:v1").unwrap().unwrap().tags.len(), 2);
}

/// No layer is in use.
fn no_layers_in_use() -> io::Result<BTreeSet<String>> {
    Ok(BTreeSet::new())
}

/// The garbage collector lists containers and images under the exclusive lock.
#[test]
fn collect_skips_while_the_store_is_locked() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let image = import(&store, io::Cursor::new(docker_archive(&Digest::of(&layer())))).unwrap().remove(0);
    let others_wait = || {
        let file = File::open(store.root().join("busy")).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared).is_err()
    };
    let in_use = || {
        assert!(others_wait(), "in_use must run under the exclusive lock");
        no_layers_in_use()
    };
    let unused = |_: &Image, _: &_| {
        assert!(others_wait(), "unused must run under the exclusive lock");
        false
    };
    store.collect_garbage(in_use, unused).unwrap();

    // A container that is being created: its image is resolved, but its layers are not recorded
    // yet.
    let guard = store.lock_shared().unwrap();
    assert!(store.remove("app:v1").unwrap() && store.remove("app:v2").unwrap());
    assert_eq!(store.collect_garbage(no_layers_in_use, |_, _| false).unwrap(), None);
    assert!(store.layer(&image.layers[0]).exists());
    drop(guard);
    assert!(store.collect_garbage(no_layers_in_use, |_, _| false).unwrap() > Some(0));
    assert!(!store.layer(&image.layers[0]).exists());
}

#[test]
fn collect_keeps_blobs_with_a_lease() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let add = |content: &str| import(&store, io::Cursor::new(small_image(content).1)).unwrap().remove(0);
    let (required, other) = (add("wanted"), add("other"));
    let is_there = |image: &Image| (store.blob(&image.id).exists(), store.layer(&image.layers[0]).exists());
    let lease = store.lease(&[required.id.hex(), &required.layers[0]]).unwrap();
    let collect = || store.collect_garbage(no_layers_in_use, |_, _| true).unwrap();
    assert!(collect() > Some(0));
    assert_eq!((is_there(&required), is_there(&other)), ((true, true), (false, false)));
    // Cleanup at startup keeps the leases of other processes.
    store.clean();
    assert_eq!(collect(), Some(0));
    drop(lease);
    // A stale lease of a killed process.
    std::fs::write(store.temp_dir().join("needed-x"), required.id.hex()).unwrap();
    assert!(collect() > Some(0));
    assert_eq!(is_there(&required), (false, false));
    store.clean();
    assert_eq!(std::fs::read_dir(store.temp_dir()).unwrap().count(), 0);
}

/// An image with a single layer that contains one file.
fn small_image(content: &str) -> (String, Vec<u8>) {
    let mut layer = tar::Builder::new(Vec::new());
    append(&mut layer, "file", content.len() as u64, &mut content.as_bytes()).unwrap();
    let layer = layer.into_inner().unwrap();
    let config = serde_json::json!({"rootfs": {"diff_ids": [Digest::of(&layer).to_string()]}}).to_string();
    let name = format!("{content}:v1");
    let list = serde_json::json!([{"Config": "c.json", "RepoTags": [name], "Layers": ["l.tar"]}]).to_string();
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in
        [("c.json", config.as_bytes()), ("l.tar", &layer), ("manifest.json", list.as_bytes())]
    {
        append(&mut archive, name, bytes.len() as u64, &mut &bytes[..]).unwrap();
    }
    (name, archive.into_inner().unwrap())
}

#[test]
fn collect_handles_corrupt_images() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let add = |content: &str| {
        let (_, archive) = small_image(content);
        import(&store, io::Cursor::new(archive)).unwrap().remove(0)
    };
    let (cut, used, blank, unused, healthy) =
        (add("cut"), add("used"), add("blank"), add("unneeded"), add("fine"));
    // After a power loss: one configuration is truncated, one is missing, and one manifest is
    // empty.
    std::fs::write(store.blob(&cut.id), "{").unwrap();
    std::fs::remove_file(store.blob(&used.id)).unwrap();
    std::fs::write(store.blob(&blank.manifest), "").unwrap();
    let in_use = || Ok(used.layers.iter().cloned().collect());
    let released_bytes = store.collect_garbage(in_use, |image, _| image.id == unused.id).unwrap();
    assert!(released_bytes > Some(0));
    let is_there = |image: &Image| {
        (store.find(&image.id.to_string()).unwrap().is_some(), store.layer(&image.layers[0]).exists())
    };
    assert_eq!(is_there(&cut), (false, false), "an image without config is removed");
    assert_eq!(is_there(&used), (true, true), "an image used by a container is kept");
    assert_eq!(is_there(&blank), (true, true), "an image without manifest is kept");
    assert_eq!(is_there(&unused), (false, false));
    assert_eq!(is_there(&healthy), (true, true));
    // A new import repairs the image, whether its layers still exist or not.
    for (name, image) in [("cut", &cut), ("used", &used), ("blank", &blank)] {
        assert_eq!(&add(name), image);
        assert!(store.config(image).is_ok() && store.manifest(image).is_ok(), "{name}");
    }
    store.collect_garbage(no_layers_in_use, |_, _| false).unwrap();
    assert_eq!(store.images().unwrap().len(), 4);
}
