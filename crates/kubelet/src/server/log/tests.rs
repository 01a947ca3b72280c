use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;

const LOG: &str = "\
2026-01-01T00:00:01.5Z stdout F one
2026-01-01T00:00:02Z stderr P tw
2026-01-01T00:00:02.1Z stderr F o
not a line
2026-01-01T00:00:03.123456789Z stdout F three  with spaces
2026-01-01T00:00:04Z stdout F 
2026-01-01T00:00:05Z stdout P unfinished";

fn read_log(log: &str, query: &str, chunk_size: usize) -> String {
    let now = "2026-01-01T00:00:06Z".parse().expect("a time");
    let options = PodLogOptions::parse(query, now).expect("options");
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    std::io::Write::write_all(&mut file, log.as_bytes()).expect("written");
    let mut log = LogReader::open(file.path().to_owned(), &options).expect("a log");
    log.buffer.truncate(chunk_size);
    let mut out = Vec::new();
    while let LogChunk::Data(bytes) = log.read().expect("a piece") {
        out.extend_from_slice(&bytes);
    }
    String::from_utf8(out).expect("text")
}

#[track_caller]
fn check(query: &str, expected: Expect) {
    expected.assert_eq(&read_log(LOG, query, CHUNK_BYTES));
}

#[test]
fn query_options_filter_the_log() {
    check(
        "",
        expect![[r#"
        one
        two
        three  with spaces

    "#]],
    );
    check(
        "timestamps=true&sinceSeconds=5",
        expect![[r#"
        2026-01-01T00:00:01.500000000Z one
        2026-01-01T00:00:02.000000000Z two
        2026-01-01T00:00:03.123456789Z three  with spaces
        2026-01-01T00:00:04.000000000Z 
    "#]],
    );
    check(
        "sinceTime=2026-01-01T00:00:03Z",
        expect![[r#"
        three  with spaces

    "#]],
    );
    check(
        "tailLines=2",
        expect![[r#"
        three  with spaces

    "#]],
    );
    check("tailLines=0", expect![""]);
    check("tailLines=100&limitBytes=6", expect!["one\ntw"]);
}

#[test]
fn rejects_invalid_options() {
    for (query, code) in [
        ("tailLines=x", 400),
        ("tailLines=-1", 422),
        ("limitBytes=0", 422),
        ("sinceSeconds=1&sinceTime=2026-01-01T00:00:03Z", 422),
        ("sinceTime=yesterday", 400),
    ] {
        let error = PodLogOptions::parse(query, Timestamp::UNIX_EPOCH).expect_err(query);
        assert_eq!(error.0.as_u16(), code, "{query}");
    }
}

proptest! {
    #[test]
    fn output_is_the_same_for_every_chunk_size(chunk_size in 1usize..200, limit in 1u64..80, tail in 0u64..8) {
        let query = format!("limitBytes={limit}&tailLines={tail}&timestamps=true");
        prop_assert_eq!(read_log(LOG, &query, chunk_size), read_log(LOG, &query, CHUNK_BYTES));
    }

    #[test]
    fn output_is_within_the_byte_limit(bytes in proptest::collection::vec(any::<u8>(), 0..300), limit in 1u64..50) {
        let given = LogParser::new(Some(Timestamp::UNIX_EPOCH), true, Some(limit)).process(&bytes);
        prop_assert!(given.len() as u64 <= limit);
    }
}

#[tokio::test]
async fn change_in_the_log_directory_is_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let changes = DirWatcher::new(dir.path()).expect("a watch");
    let file = dir.path().join("0.log");
    std::fs::write(&file, "x").expect("written");
    changes.next().await.expect("sent");
}
