//! Kills a writing process repeatedly: every acknowledged write must be present, and any other
//! write completely or not at all.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Command, Stdio};

use super::*;

const ROUNDS: usize = 30;
const WRITER_COUNT: usize = 8;
const DIR_ENV: &str = "SKIFF_TEST_CRASH_DIR";

fn config() -> Config {
    // Small limits, so that segments and snapshots are replaced all the time.
    Config { snapshot_bytes: 32 << 10, history_events: 100, ..Config::default() }
}

/// A value with a checksum, so that a partial one is detected.
fn value(key: &str, n: u64) -> String {
    let text = format!("{key} {n} {}", "x".repeat((n * 37 % 900) as usize));
    format!("{text} {}", crc32c::crc32c(text.as_bytes()))
}

fn parse_number(key: &str, found: &[u8]) -> u64 {
    let found = std::str::from_utf8(found).unwrap();
    let n = found.split(' ').nth(1).unwrap().parse().unwrap();
    assert_eq!(found, value(key, n));
    n
}

/// Not a test by itself: the child process that is killed. Increments one key per writer and prints
/// the acknowledged values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn victim() {
    let Some(dir) = std::env::var_os(DIR_ENV) else { return };
    let store = Arc::new(LogStore::open(Path::new(&dir), config()).unwrap());
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITER_COUNT {
        let store = store.clone();
        tasks.spawn(async move {
            let key = format!("/crash/{writer}");
            loop {
                let (n, expect) = match store.get(&key).await.unwrap() {
                    Some(entry) => (parse_number(&key, &entry.value) + 1, Expect::Revision(entry.revision)),
                    None => (1, Expect::Absent),
                };
                let write = Write { lazy: writer == 0, ..put(&key, &value(&key, n), expect) };
                let revision = store.write(write).await.unwrap();
                let mut out = std::io::stdout().lock();
                writeln!(out, "acknowledged {key} {n} {revision}").and_then(|()| out.flush()).unwrap();
            }
        });
    }
    tasks.join_next().await;
}

#[tokio::test]
async fn acked_writes_persist_after_kill() {
    let dir = tempfile::tempdir().unwrap();
    let mut acked: HashMap<String, u64> = HashMap::new();
    let mut latest = 0;
    for round in 0..ROUNDS {
        // From a store that was just opened to one with many snapshots.
        let lines = round * round * 3 + 1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::tests::crash::victim", "--nocapture"])
            .env(DIR_ENV, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut seen = 0;
        let mut line = String::new();
        while output.read_line(&mut line).unwrap() > 0 {
            // An incomplete line is ignored.
            if let Some((_, rest)) = line.split_once("acknowledged ")
                && let Some(rest) = rest.strip_suffix('\n')
            {
                let parts: Vec<&str> = rest.split(' ').collect();
                acked.insert(parts[0].to_owned(), parts[1].parse().unwrap());
                latest = latest.max(parts[2].parse().unwrap());
                seen += 1;
                if seen == lines {
                    child.kill().unwrap();
                }
            }
            line.clear();
        }
        child.wait().unwrap();
        assert!(seen >= lines, "round {round}: child exited by itself after {seen} writes");
        let store = LogStore::open(dir.path(), config()).unwrap();
        assert!(store.revision().await.unwrap() >= latest);
        for (key, expected) in &mut acked {
            let entry = store.get(key).await.unwrap().expect("an acknowledged key");
            let n = parse_number(key, &entry.value);
            // One more write may have been in flight. The next round starts from it.
            assert!(
                n == *expected || n == *expected + 1,
                "round {round}: {key} is {n}, acknowledged {expected}"
            );
            *expected = n;
        }
        drop(store);
    }
    assert_eq!(acked.len(), WRITER_COUNT);
    assert!(!files_with_extension(dir.path(), "snap").is_empty());
}
