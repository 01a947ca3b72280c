//! Third-party clients: the Python client here, the `kube` crate in `clienttest`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use testkit::Server;

/// Pinned, so that the tests depend only on the server.
const PACKAGES: [(&str, &str); 2] = [("kubernetes", "37.0.2"), ("kopf", "1.38.0")];

#[test]
fn python_client_is_supported() {
    check("walk.py", "config_maps\npods\ndeployments\neverything_dynamic\n");
}

#[test]
fn kopf_operator_is_supported() {
    check("harbor.py", "established\nmade\nchanged\ndeleted\n");
}

/// Runs a script of `tests/clients` against a server of its own.
#[track_caller]
fn check(script: &str, expected: &str) {
    let python = python_with_clients();
    let server = Server::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
    let output = Command::new(python).arg(script).arg(server.kubeconfig()).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(stdout, expected);
}

/// The Python interpreter of a virtual environment. It is created once and kept, because that needs
/// network access.
fn python_with_clients() -> PathBuf {
    // Both tests may create it at the same time.
    static INSTALL_LOCK: Mutex<()> = Mutex::new(());
    let _guard = INSTALL_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let venv = cache.expect("HOME is set").join("skiff/venv");
    let python = venv.join("bin/python3");
    let known = |(name, version)| format!("assert m.version('{name}') == '{version}'");
    let version_check = format!("import importlib.metadata as m\n{}", PACKAGES.map(known).join("\n"));
    if Command::new(&python).args(["-c", &version_check]).output().is_ok_and(|output| output.status.success())
    {
        return python;
    }
    println!("installing {PACKAGES:?} from PyPI into {}", venv.display());
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    let pip_args = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    let packages = PACKAGES.map(|(name, version)| format!("{name}=={version}"));
    run(Command::new(&python).args(pip_args).args(packages));
    python
}

#[track_caller]
fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cannot install the Python client ({command:?}): {words}");
}
