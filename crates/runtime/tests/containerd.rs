//! The CRI client against a real containerd: the lifecycle of a pod, and the error without a runtime.

use std::time::Duration;

use runtime::cri::{
    ContainerConfig, ContainerMetadata, ContainerState, ImageSpec, LinuxPodSandboxConfig,
    LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxMetadata,
    PodSandboxState,
};
use runtime::{Remote, Runtime};
use testkit::Containerd;

#[tokio::test(flavor = "multi_thread")]
async fn runs_a_pod_from_start_to_removal() {
    let dir = tempfile::tempdir().unwrap();
    let containerd = Containerd::start(dir.path()).unwrap();
    let runtime = Remote::new(&format!("unix://{}", containerd.socket().display()));
    assert_eq!(runtime.version().await.unwrap().runtime_name, "containerd");

    let sandbox_config = sandbox_config(&dir.path().join("logs").display().to_string());
    let sandbox = runtime.run_sandbox(&sandbox_config, "").await.unwrap_or_else(|error| {
        panic!("{error}\n{}", containerd.log());
    });
    let status = runtime.sandbox_status(&sandbox).await.unwrap();
    assert_eq!(status.state(), PodSandboxState::Ready);

    let image = ImageSpec { image: "busybox:1.36".into(), ..ImageSpec::default() };
    let found = runtime.image(&image).await.unwrap().expect("the image was imported");
    assert!(found.repo_tags.contains(&"docker.io/library/busybox:1.36".to_owned()), "{found:?}");
    let missing = ImageSpec { image: "nosuch:1".into(), ..ImageSpec::default() };
    assert!(runtime.image(&missing).await.unwrap().is_none());

    let config = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(image),
        command: ["sh", "-c", "echo hello; exit 3"].map(str::to_owned).into(),
        log_path: "main.log".into(),
        ..ContainerConfig::default()
    };
    let short = runtime.create_container(&sandbox, &config, &sandbox_config).await.unwrap();
    runtime.start_container(&short).await.unwrap();
    let ended = loop {
        let status = runtime.container_status(&short).await.unwrap();
        if status.state() == ContainerState::Exited {
            break status;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!((ended.exit_code, ended.reason.as_str()), (3, "Error"));
    let log = std::fs::read_to_string(dir.path().join("logs/main.log")).unwrap();
    assert!(log.trim_end().ends_with(" stdout F hello"), "{log}");

    let long = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "long".into(), attempt: 0 }),
        command: Vec::new(),
        ..config
    };
    let long = runtime.create_container(&sandbox, &long, &sandbox_config).await.unwrap();
    runtime.start_container(&long).await.unwrap();
    let command = ["sh", "-c", "echo out; echo err >&2; exit 7"].map(str::to_owned);
    let output = runtime.exec_sync(&long, &command, Duration::from_secs(10)).await.unwrap();
    assert_eq!((output.stdout, output.stderr, output.exit_code), (b"out\n".to_vec(), b"err\n".to_vec(), 7));
    assert_eq!(runtime.containers(&[]).await.unwrap().len(), 2);

    // Stopping and removing again is not an error.
    for _ in 0..2 {
        runtime.stop_container(&long, Duration::ZERO).await.unwrap();
        runtime.stop_sandbox(&sandbox).await.unwrap();
        runtime.remove_sandbox(&sandbox).await.unwrap();
    }
    assert!(runtime.containers(&[]).await.unwrap().is_empty());
    assert!(runtime.sandboxes(&[]).await.unwrap().is_empty());
    let error = runtime.container_status(&long).await.unwrap_err();
    assert!(error.is_not_found(), "{error}");
}

#[tokio::test]
async fn unreachable_error_names_the_socket() {
    let error = Remote::new("/nonexistent/containerd.sock").version().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the container runtime at /nonexistent/containerd.sock cannot be reached: is it running?"
    );
}

/// In the host's network, so that no pod network is needed.
fn sandbox_config(logs: &str) -> PodSandboxConfig {
    let options = NamespaceOption { network: NamespaceMode::Node.into(), ..NamespaceOption::default() };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "web".into(),
            uid: "1234".into(),
            namespace: "default".into(),
            attempt: 0,
        }),
        log_directory: logs.to_owned(),
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}
