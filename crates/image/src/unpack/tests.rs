//! Tests with generated layers, valid and malicious. Owners and devices need root.

use proptest::prelude::*;

use super::*;

/// Builds a layer from lines such as `d bin`, `f bin/sh text`, `l bin/ash -> sh`, `h bin/hard ->
/// bin/sh`.
fn layer(lines: &[&str]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for line in lines {
        let (kind, rest) = line.split_at(2);
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_uid(7);
        header.set_gid(8);
        header.set_mtime(1_000_000);
        header.set_size(0);
        let (name, more) = rest.split_once(' ').unwrap_or((rest, ""));
        let target = more.trim_start_matches("-> ");
        header.set_entry_type(match kind.trim() {
            "d" => EntryType::Directory,
            "l" => EntryType::Symlink,
            "h" => EntryType::Link,
            "p" => EntryType::Fifo,
            "c" => EntryType::Char,
            _ => EntryType::Regular,
        });
        if kind.trim() == "f" {
            header.set_size(more.len() as u64);
        } else if kind.trim() == "c" {
            // The device number of /dev/null.
            header.set_device_major(1).unwrap();
            header.set_device_minor(3).unwrap();
        } else if !target.is_empty() {
            header.set_link_name_literal(target).unwrap();
        }
        // Writes the raw name: the tar crate rejects names with `..`.
        let bytes = &mut header.as_gnu_mut().unwrap().name;
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, if kind.trim() == "f" { more.as_bytes() } else { b"" }).unwrap();
    }
    builder.into_inner().unwrap()
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

/// Unpacks layers on top of each other and lists the last one.
#[track_caller]
fn check(layers: &[&[&str]], expected: &str) {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut below: Vec<PathBuf> = Vec::new();
    let mut last = Ok(());
    for (number, lines) in layers.iter().enumerate() {
        let root = directory.path().join(number.to_string());
        last = unpack(&layer(lines)[..], &root, &below);
        below.insert(0, root);
    }
    let listed = match last {
        Ok(()) => list(&below[0], &below[0]),
        Err(error) => format!("{error}\n"),
    };
    assert_eq!(listed, expected);
}

fn list(root: &Path, directory: &Path) -> String {
    let mut entries: Vec<_> = fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    let mut text = String::new();
    for path in entries {
        let found = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(root).unwrap().display();
        let kind = found.file_type();
        let owner = format!("{}:{} {:o}", found.uid(), found.gid(), found.mode() & 0o7777);
        if kind.is_symlink() {
            text += &format!("{name} -> {}\n", fs::read_link(&path).unwrap().display());
        } else if kind.is_dir() {
            let opaque = rustix::fs::lgetxattr(&path, c"trusted.overlay.opaque", &mut [0u8; 4][..]).is_ok();
            text += &format!("{name}/ {owner}{}\n{}", if opaque { " opaque" } else { "" }, list(root, &path));
        } else if kind.is_file() {
            text += &format!("{name} {owner} {:?}\n", fs::read_to_string(&path).unwrap());
        } else {
            text += &format!("{name} special {}\n", found.rdev());
        }
    }
    text
}

#[test]
fn unpack_files_links_and_devices() {
    check(
        &[&[
            "d bin",
            "f bin/sh shell",
            "l bin/ash -> sh",
            "h bin/hard -> bin/sh",
            "p fifo",
            "c null",
            "f a/b/c deep",
        ]],
        "a/ 0:0 755\na/b/ 0:0 755\na/b/c 7:8 644 \"deep\"\nbin/ 7:8 644\nbin/ash -> sh\nbin/hard 7:8 644 \"shell\"\n\
         bin/sh 7:8 644 \"shell\"\nfifo special 0\nnull special 259\n",
    );
}

#[test]
fn unpack_whiteouts() {
    check(
        &[&["f a/x 1", "f b/y 2"], &["f a/.wh.x", "f b/.wh..wh..opq", "f b/z 3", "f .wh..wh.aufs"]],
        "a/ 0:0 755\na/x special 0\nb/ 0:0 755 opaque\nb/z 7:8 644 \"3\"\n",
    );
}

/// Whiteouts only hide the layers below, whatever their position in the archive.
#[test]
fn whiteouts_keep_entries_of_their_own_layer() {
    let below = ["f a/x 1", "f b 2"];
    for lines in
        [&["f .wh.a", "d a", "f a/y 3"][..], &["d a", "f a/y 3", "f .wh.a"], &["f a 1", "d a", "f a/y 3"]]
    {
        check(&[&below, lines], "a/ 7:8 644 opaque\na/y 7:8 644 \"3\"\n");
    }
    check(&[&below, &["f .wh.a", "f a/y 3"]], "a/ 0:0 755 opaque\na/y 7:8 644 \"3\"\n");
    check(&[&below, &["f b 3", "f .wh.b"]], "b 7:8 644 \"3\"\n");
    check(&[&below, &["f .wh.b", "f b 3"]], "b 7:8 644 \"3\"\n");
    // A hidden file is not a valid hard link target.
    for (lines, target) in [
        (&["f .wh.b", "h c -> b"][..], "b"),
        (&["f .wh.a", "h c -> a/x"], "a/x"),
        (&["f a/.wh.x", "h c -> a/x"], "a/x"),
        (&["f a/.wh..wh..opq", "h c -> a/x"], "a/x"),
    ] {
        check(&[&below, lines], &format!("{target}\n"));
    }
    // A hidden symlink is not followed.
    check(
        &[&["d b", "l a/b -> /b"], &["f a/.wh..wh..opq", "f a/b/x 1"]],
        "a/ 0:0 755 opaque\na/b/ 0:0 755\na/b/x 7:8 644 \"1\"\n",
    );
}

#[test]
fn whiteout_names_need_not_be_utf8() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    let mut layer = layer(&["f .wh.a#"]);
    let mut header = tar::Header::from_byte_slice(&layer[..512]).clone();
    header.as_gnu_mut().unwrap().name[5] = 0xff;
    header.set_cksum();
    layer[..512].copy_from_slice(header.as_bytes());
    unpack(&layer[..], &root, &[]).unwrap();
    assert!(fs::symlink_metadata(root.join(OsStr::from_bytes(b"a\xff"))).is_ok());
}

#[test]
fn applies_metadata_to_the_root_directory() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (directory.path().join("1"), directory.path().join("2"));
    unpack(&layer(&["d ./", "f ./a x"])[..], &one, &[]).unwrap();
    unpack(&layer(&["f b x"])[..], &two, std::slice::from_ref(&one)).unwrap();
    for root in [one, two] {
        let found = fs::metadata(root).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (7, 0o644));
    }
}

#[test]
fn implicit_directories_copy_metadata_from_below() {
    check(&[&["d home"], &["f home/file x"]], "home/ 7:8 644\nhome/file 7:8 644 \"x\"\n");
}

#[test]
fn follows_directory_symlinks_inside_the_root() {
    check(
        &[&["d usr/lib", "l lib -> /usr/lib"], &["f lib/new x"]],
        "usr/ 0:0 755\nusr/lib/ 7:8 644\nusr/lib/new 7:8 644 \"x\"\n",
    );
    check(&[&["l up -> ../../../..", "f up/file x"]], "file 7:8 644 \"x\"\nup -> ../../../..\n");
    check(
        &[&["l out -> /etc", "f out/skiff-escaped x"]],
        "etc/ 0:0 755\netc/skiff-escaped 7:8 644 \"x\"\nout -> /etc\n",
    );
    assert!(!Path::new("/etc/skiff-escaped").exists());
}

#[test]
fn rejects_paths_outside_the_root() {
    check(&[&["f ../out x"]], "../out is outside the layer root\n");
    check(&[&["f a/../../out x"]], "a/../../out is outside the layer root\n");
    check(&[&["f /etc/inside x"]], "etc/ 0:0 755\netc/inside 7:8 644 \"x\"\n");
    check(&[&["h out -> ../../etc/passwd"]], "../../etc/passwd is outside the layer root\n");
    check(&[&["h out -> /etc/passwd"]], "/etc/passwd\n");
    check(&[&["l a -> b", "l b -> a", "f a/x y"]], "too many symlinks in path a/x\n");
    // A hidden symlink of a lower layer must not lead to files of the host.
    check(&[&["l a -> /etc"], &["d a", "h out -> a/passwd"]], "a/passwd\n");
}

#[test]
fn later_entries_replace_earlier_ones() {
    check(&[&["f a 1", "d a", "f a/b 2", "f c/d 3", "l c -> a"]], "a/ 7:8 644\na/b 7:8 644 \"2\"\nc -> a\n");
    check(&[&["f a 1", "f a/b 2"]], "a/ 0:0 755\na/b 7:8 644 \"2\"\n");
}

#[test]
fn unpack_gzip_and_zstd_layers() {
    use std::io::Write as _;
    let plain = layer(&["f a 1"]);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
    let twice = [
        zstd.clone(),
        ruzstd::encoding::compress_to_vec(&b"more"[..], ruzstd::encoding::CompressionLevel::Fastest),
    ]
    .concat();
    // podman appends skippable frames; other programs write them first.
    let skip_frame = |kind: u8, content: &[u8]| {
        let length = (content.len() as u32).to_le_bytes();
        [&[kind, 0x2a, 0x4d, 0x18], &length[..], content].concat()
    };
    let chunked = [&zstd[..], &skip_frame(0x50, b"list"), &skip_frame(0x5f, b"")].concat();
    let with_skip_frame_first = [&skip_frame(0x57, &[7; 100_000]), &zstd[..]].concat();
    let cut = chunked[..chunked.len() - 10].to_vec();
    let all = |compressed: Vec<u8>| {
        let mut bytes = Vec::new();
        decompress(io::Cursor::new(compressed)).unwrap().read_to_end(&mut bytes).map(|_| bytes)
    };
    for (compressed, extra) in [
        (plain.clone(), ""),
        (gzip.finish().unwrap(), ""),
        (zstd, ""),
        (twice, "more"),
        (chunked, ""),
        (with_skip_frame_first, ""),
    ] {
        assert_eq!(all(compressed).unwrap(), [&plain[..], extra.as_bytes()].concat());
    }
    assert_eq!(all(cut).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

/// The capabilities 1 and 3: the bitmask 0x0a is a newline.
const CAPABILITIES: [u8; 20] = [1, 0, 0, 2, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn capability_xattr(path: &Path) -> Option<Vec<u8>> {
    let mut value = [0; 64];
    let length = rustix::fs::lgetxattr(path, c"security.capability", &mut value[..]).ok()?;
    Some(value[..length].to_vec())
}

#[test]
fn reads_pax_values_with_newlines() {
    if !is_root() {
        return;
    }
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, kind, records: &[(&str, &[u8])], content: &[u8]| {
        builder.append_pax_extensions(records.iter().copied()).unwrap();
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_path(name).unwrap();
        // The size in the PAX header overrides the one in the tar header.
        header.set_size(if records.iter().any(|(key, _)| *key == "size") { 0 } else { content.len() as u64 });
        header.set_cksum();
        let padding = vec![0; content.len().next_multiple_of(512) - content.len()];
        let written = [&header.as_bytes()[..], content, &padding].concat();
        builder.get_mut().extend(written);
    };
    let capabilities = ("SCHILY.xattr.security.capability", &CAPABILITIES[..]);
    let content = vec![b'x'; 700];
    add("ping", EntryType::Regular, &[capabilities, ("uid", b"3000000"), ("size", b"700")], &content);
    add("plain", EntryType::Regular, &[("path", b"a\nb"), ("gid", b"7")], b"1");
    add("link", EntryType::Symlink, &[("linkpath", b"a\nb")], b"");
    add("last", EntryType::Regular, &[], b"2");
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path().join("below");
    unpack(&builder.into_inner().unwrap()[..], &below, &[]).unwrap();
    let ping = fs::metadata(below.join("ping")).unwrap();
    assert_eq!((ping.uid(), ping.len()), (3_000_000, 700));
    assert_eq!(capability_xattr(&below.join("ping")).unwrap(), CAPABILITIES);
    assert_eq!(fs::metadata(below.join("a\nb")).unwrap().gid(), 7);
    assert_eq!(fs::read_to_string(below.join("link")).unwrap(), "1");
    assert_eq!(fs::read_to_string(below.join("last")).unwrap(), "2");

    // A hard link to a file of a lower layer is a copy with all metadata.
    let above = directory.path().join("above");
    unpack(&layer(&["h pong -> ping"])[..], &above, &[below]).unwrap();
    let pong = fs::metadata(above.join("pong")).unwrap();
    assert_eq!((pong.uid(), pong.len(), pong.mtime()), (3_000_000, 700, ping.mtime()));
    assert_eq!(capability_xattr(&above.join("pong")).unwrap(), CAPABILITIES);
}

/// Unpacks a sparse file in one of the formats of GNU tar.
#[track_caller]
fn check_sparse(records: &[(&str, &[u8])], content: &[u8], expected: Result<&[u8], ()>) {
    if !is_root() {
        return;
    }
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_pax_extensions(records.iter().copied()).unwrap();
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, "GNUSparseFile.1/file", content).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    let result = unpack(&builder.into_inner().unwrap()[..], &root, &[]);
    let read = result.map(|()| fs::read(root.join("a")).unwrap()).map_err(drop);
    assert!(read.as_deref() == expected.as_ref().copied(), "{records:?} {read:?}");
}

#[test]
fn unpack_sparse_files() {
    let expected = [&b"one"[..], &[0; 997], b"two", &[0; 97]].concat();
    let name: (&str, &[u8]) = ("GNU.sparse.name", b"a");
    let size: (&str, &[u8]) = ("GNU.sparse.size", b"1100");
    let part = |from: &'static str, length: &'static str| -> [(&str, &[u8]); 2] {
        [("GNU.sparse.offset", from.as_bytes()), ("GNU.sparse.numbytes", length.as_bytes())]
    };
    let oldest = [&[name, size][..], &part("0", "3"), &part("1000", "3")].concat();
    check_sparse(&oldest, b"onetwo", Ok(&expected));
    check_sparse(&oldest[..5], b"onetwo", Err(()));
    check_sparse(&[name, size, ("GNU.sparse.map", b"0,3,1000,3")], b"onetwo", Ok(&expected));
    check_sparse(&[name, size, ("GNU.sparse.map", b"0,3,1000,3")], b"one", Err(()));
    check_sparse(&[name, size, ("GNU.sparse.map", b"0,3,1098,3")], b"onetwo", Err(()));
    let version_one: [(&str, &[u8]); 4] =
        [("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"), name, ("GNU.sparse.realsize", b"1100")];
    let inside = |list: &[u8]| {
        let mut content = list.to_vec();
        content.resize(list.len().next_multiple_of(512), 0);
        [&content[..], b"onetwo"].concat()
    };
    check_sparse(&version_one, &inside(b"2\n0\n3\n1000\n3\n"), Ok(&expected));
    // A map of more than one block.
    let long = [&b"202\n0\n3\n"[..], &b"5\n0\n".repeat(200), b"1000\n3\n"].concat();
    check_sparse(&version_one, &inside(&long), Ok(&expected));
    for list in [&b"3\n0\n3\n1000\n3\n"[..], b"x\n", b"99999999999999999999\n", b"18446744073709551615\n"] {
        check_sparse(&version_one, &inside(list), Err(()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No layer can change files outside its directory.
    #[test]
    fn any_layer_stays_inside_the_root(lines in proptest::collection::vec(
        ("[dflhp]", "(\\.\\./|/)?[a-c](/(\\.\\.|[a-c]|\\.wh\\.[a-c])){0,3}", "(\\.\\./){0,3}/?[a-c](/[a-c]){0,2}"), 0..12)
    ) {
        if rustix::process::geteuid().is_root() {
            let lines: Vec<String> = lines.iter().map(|(kind, name, target)| match kind.as_str() {
                "l" | "h" => format!("{kind} {name} -> {target}"),
                _ => format!("{kind} {name} x"),
            }).collect();
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            let directory = tempfile::tempdir().unwrap();
            let _ = unpack(&layer(&lines)[..], &directory.path().join("root"), &[]);
            let entries: Vec<_> = fs::read_dir(directory.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
            prop_assert_eq!(entries, vec!["root"]);
        }
    }

    #[test]
    fn invalid_input_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let directory = tempfile::tempdir().unwrap();
        if let Ok(content) = decompress(io::Cursor::new(bytes)) {
            let _ = unpack(content, &directory.path().join("root"), &[]);
        }
    }
}
