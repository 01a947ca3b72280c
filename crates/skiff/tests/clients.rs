//! Clients that other people wrote: the Python client here, the `kube` crate in `clienttest`.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::Server;

/// Held still, so that the test is about the server.
const PACKAGE: &str = "kubernetes==37.0.2";

#[test]
fn the_python_client_works() {
    let python = python_with_client();
    let server = Server::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/walk.py");
    let output = Command::new(python).arg(script).arg(server.kubeconfig()).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(printed, "config_maps\npods\ndeployments\neverything_dynamic\n");
}

/// The Python of an environment that is made once and kept, since making it needs the network.
fn python_with_client() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let venv = cache.expect("HOME is set").join("skiff/venv");
    let python = venv.join("bin/python3");
    let wanted = format!(
        "import importlib.metadata as m; assert 'kubernetes==' + m.version('kubernetes') == '{PACKAGE}'"
    );
    if Command::new(&python).args(["-c", &wanted]).output().is_ok_and(|output| output.status.success()) {
        return python;
    }
    println!("installing {PACKAGE} from PyPI into {}", venv.display());
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    run(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ]));
    python
}

#[track_caller]
fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cannot install the Python client ({command:?}): {words}");
}
