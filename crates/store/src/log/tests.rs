//! The shared suite on this engine, and what only this engine promises.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suite() {
    let dir = tempfile::tempdir().unwrap();
    crate::suite::run(Arc::new(LogStore::open(dir.path(), Config::default()).unwrap())).await;
}
