//! Runs the shared suite on a real etcd, which is started for the test on its own ports.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::Event;
use crate::suite;

struct EtcdProcess {
    process: Child,
    port: u16,
}

impl EtcdProcess {
    /// `None` if tests with etcd are disabled.
    fn start(dir: &Path, port: u16) -> Option<EtcdProcess> {
        if std::env::var_os("SKIFF_TEST_NO_ETCD").is_some() {
            eprintln!("skipped: SKIFF_TEST_NO_ETCD is set");
            return None;
        }
        let url = format!("http://127.0.0.1:{port}");
        let process = Command::new("etcd")
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", "http://127.0.0.1:0", "--log-level", "error"])
            // Short intervals, because the minimum lease TTL is derived from them.
            .args(["--heartbeat-interval", "10", "--election-timeout", "100", "--data-dir"])
            .arg(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd must be on the PATH (apt-get install etcd-server), or SKIFF_TEST_NO_ETCD be set");
        Some(EtcdProcess { process, port })
    }

    async fn connect(&self) -> EtcdStore {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let started = std::time::Instant::now();
        loop {
            match EtcdStore::connect(&[&endpoint], Options::default()).await {
                Ok(store) => return store,
                Err(error) => assert!(started.elapsed() < Duration::from_secs(30), "{error}"),
            }
        }
    }
}

impl Drop for EtcdProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_store_suite() {
    let dir = tempfile::tempdir().unwrap();
    let Some(etcd) = EtcdProcess::start(dir.path(), free_port()) else { return };
    suite::run(Arc::new(etcd.connect().await)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_watches_continue_after_etcd_restart() {
    let dir = tempfile::tempdir().unwrap();
    let Some(etcd) = EtcdProcess::start(dir.path(), free_port()) else { return };
    let port = etcd.port;
    let store = etcd.connect().await;
    let mut watch = suite::watch(&store, "/a/", 1).await.unwrap();
    let first_revision = suite::create(&store, "/a/1", "x").await;
    assert_eq!(suite::events_until(&mut watch, first_revision).await.len(), 1);
    drop(etcd);
    let result = store.write(suite::put("/a/2", "", Expect::Absent)).await;
    assert!(matches!(result, Err(Error::Unavailable { .. })), "{result:?}");

    let etcd = EtcdProcess::start(dir.path(), port).unwrap();
    let other = etcd.connect().await;
    let second_revision = suite::create(&other, "/a/2", "y").await;
    let events = suite::events_until(&mut watch, second_revision).await;
    assert!(
        matches!(&events[..], [Event::Put { entry, created: true }] if entry.revision == second_revision)
    );
    assert_eq!(store.get("/a/2").await.unwrap().map(|entry| entry.revision), Some(second_revision));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_spans_multiple_pages() {
    let dir = tempfile::tempdir().unwrap();
    let Some(etcd) = EtcdProcess::start(dir.path(), free_port()) else { return };
    let store = Arc::new(etcd.connect().await);
    let count = PAGE_KEYS + 10;
    let tasks: Vec<_> = (0..16)
        .map(|writer| {
            let store = store.clone();
            tokio::spawn(async move {
                for n in (writer..count).step_by(16) {
                    suite::create(&*store, &format!("/long/{n:05}"), "v").await;
                }
            })
        })
        .collect();
    for writer in tasks {
        writer.await.unwrap();
    }
    for (limit, entries) in [(0, count), (PAGE_KEYS + 3, PAGE_KEYS + 3), (count, count), (5, 5)] {
        let page = store.list("/long/", None, limit, None).await.unwrap();
        assert_eq!((page.entries.len(), page.remaining), (entries, count - entries));
        assert!(page.entries.is_sorted_by_key(|entry| entry.key.clone()));
    }
}
