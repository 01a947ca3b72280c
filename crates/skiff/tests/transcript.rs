//! Transcripts that were recorded with upstream Kubernetes, if they are in a directory next to the
//! checkout: kubectl must produce the same output here. Transcripts that need controllers or a node are
//! tested elsewhere.

use std::path::Path;
use std::process::Command;

use testkit::Server;

/// Transcripts that need only an API server.
const TRANSCRIPT_FILES: &[&str] =
    &["11-labels.t", "12-bad-input.t", "16-rbac.t", "19-patch-and-apply.t", "20-api.t"];

#[test]
fn output_matches_upstream_transcript_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden");
    if !folder.join("golden").is_file() || !testkit::has_kubectl() {
        println!("skipped: no {} or no kubectl", folder.display());
        return;
    }
    let server = Server::start();
    // One process each: they mostly wait for kubectl.
    std::thread::scope(|scope| {
        for name in TRANSCRIPT_FILES {
            let (folder, kubeconfig) = (&folder, server.kubeconfig());
            scope.spawn(move || check(&kubeconfig, folder, name));
        }
    });
}

fn check(kubeconfig: &Path, folder: &Path, name: &str) {
    let mut command = Command::new("python3");
    command.arg("golden").args(["check", name]).current_dir(folder).env("KUBECONFIG", kubeconfig);
    let output = command.output().expect("python3 runs");
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
}
