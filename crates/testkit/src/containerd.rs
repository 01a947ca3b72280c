//! A real containerd with its own directories and socket, and with images that are built here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::cleanup;
use crate::process::Process;

const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A running containerd. Dropping it ends everything that it started: shims and containers outlive
/// containerd by design, but not their PID namespace.
pub struct Containerd {
    dir: PathBuf,
    /// The `nsenter` process that waits for containerd.
    process: Process,
    /// Keeps the namespaces alive while containerd is restarted.
    holder: Process,
}

impl Containerd {
    /// Starts containerd in `dir`, with the images `busybox:1.36` and `pause:3.10`.
    pub fn start(dir: &Path) -> Result<Containerd> {
        Containerd::start_with(dir, &["--net"])
    }

    /// The same in the network namespace of this process, for callers that have their own.
    pub fn start_in_this_network(dir: &Path) -> Result<Containerd> {
        Containerd::start_with(dir, &[])
    }

    fn start_with(dir: &Path, namespace_flags: &[&str]) -> Result<Containerd> {
        std::fs::create_dir_all(dir)?;
        let config = dir.join("config.toml");
        std::fs::write(&config, config_text(dir))?;
        std::fs::create_dir_all(dir.join("cni"))?;
        std::fs::write(dir.join("cni/10-test.conflist"), network_text(dir))?;
        // Namespaces of its own: mounts of containers must propagate inside but must not outlive this
        // object, and the same holds for the bridge of its pods and the processes.
        let mut command = Command::new("unshare");
        command.args(namespace_flags).args(["--mount", "--propagation", "slave"]);
        command.args(["--pid", "--fork", "--kill-child", "sh", "-c"]);
        // Mounts of the host propagate into the namespace, but not back. The streaming server listens
        // on the loopback of the network namespace. `/run/netns` is a tmpfs, so that network namespaces
        // of pods disappear with it.
        let script = "mount --make-rshared / && mount -t proc proc /proc && mkdir -p /run/netns \
            && mount -t tmpfs tmpfs /run/netns && ip link set lo up && echo ready && exec sleep 1000000";
        let mut holder = Process::spawn(command.arg(script))?;
        holder.wait_until_log(START_TIMEOUT, |log| log.contains("ready").then_some(()))?;
        let process = run(dir, &holder)?;
        let containerd = Containerd { dir: dir.to_owned(), process, holder };
        for name in ["docker.io/library/busybox:1.36", "registry.k8s.io/pause:3.10"] {
            containerd.import(&busybox_image(dir, name)?)?;
        }
        Ok(containerd)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    pub fn pid(&self) -> u32 {
        cleanup::child_of(self.process.id()).unwrap_or(self.process.id())
    }

    /// The network namespace. A program must be in it to reach the pods and their streams.
    pub fn network(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.holder.id()))
    }

    /// Kills containerd with SIGKILL and starts it again in the same namespaces. Containers are not its
    /// children.
    pub fn kill9_and_restart(&mut self) -> Result<()> {
        cleanup::kill_and_wait(self.pid());
        self.process = run(&self.dir, &self.holder)?;
        Ok(())
    }

    /// Counts the resources of pods: shims, network namespaces, links and addresses.
    pub fn resource_counts(&self) -> BTreeMap<&'static str, usize> {
        let marker = format!("-address {}", self.socket().display());
        let is_shim = |words: &str| words.contains("containerd-shim") && words.contains(&marker);
        let count = |path: String| std::fs::read_dir(path).into_iter().flatten().flatten();
        let init_pid = cleanup::child_of(self.holder.id()).unwrap_or_default();
        let addresses = count(format!("{}/addresses/test", self.dir.display()));
        // The directory also has a lock and the last assigned address.
        let is_address = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("10.");
        let network = format!("--net={}", self.network().display());
        let links = Command::new("nsenter").args([&network, "ip", "-o", "link"]).output();
        let links = links.map(|output| String::from_utf8_lossy(&output.stdout).matches(": veth").count());
        BTreeMap::from([
            ("shims", cleanup::processes().iter().filter(|(_, words)| is_shim(words)).count()),
            ("networks", count(format!("/proc/{init_pid}/root/run/netns")).count()),
            ("links", links.unwrap_or(usize::MAX)),
            ("addresses", addresses.filter(|entry| is_address(&entry.file_name())).count()),
        ])
    }

    pub fn import(&self, archive: &Path) -> Result<()> {
        ctr(&self.socket(), &["--namespace", "k8s.io", "images", "import", &archive.display().to_string()])
    }

    pub fn log(&self) -> String {
        self.process.log()
    }
}

/// Runs containerd in existing namespaces and waits until it responds.
fn run(dir: &Path, holder: &Process) -> Result<Process> {
    let target = holder.id().to_string();
    let mut command = Command::new("nsenter");
    // The holder itself is not in the PID namespace that it created for its child.
    command.args([
        "--target",
        &target,
        "--net",
        "--mount",
        &format!("--pid=/proc/{target}/ns/pid_for_children"),
    ]);
    command.args(["containerd", "--config"]);
    let mut process = Process::spawn(command.arg(dir.join("config.toml")))?;
    let socket = dir.join("containerd.sock");
    process.wait_until(START_TIMEOUT, || ctr(&socket, &["version"]).is_ok().then_some(()))?;
    Ok(process)
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let Some(init_pid) = cleanup::child_of(self.holder.id()) else { return };
        let names =
            std::fs::read_dir(format!("/proc/{init_pid}/root/run/netns")).into_iter().flatten().flatten();
        let names: Vec<_> = names.map(|entry| entry.file_name().display().to_string()).collect();
        let cgroups = cleanup::cgroups_of(&cleanup::process_tree(init_pid));
        cleanup::kill_and_wait(init_pid);
        self.process.kill();
        self.holder.kill();
        let mut remaining = cleanup::remove_cgroups(&cgroups);
        remaining.extend(cleanup::remaining_state(&self.dir));
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        remaining.extend(names.into_iter().filter(|name| mounts.contains(name.as_str())));
        if !std::thread::panicking() {
            assert!(remaining.is_empty(), "containerd left resources behind: {remaining:#?}");
        }
    }
}

fn config_text(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"version = 2
root = "{dir}/root"
state = "{dir}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{dir}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.10"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{dir}/cni"
    bin_dir = "/usr/lib/cni"
"#
    )
}

/// CNI configuration: a bridge with addresses from a file, and the portmap plugin for host ports.
fn network_text(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"{{"cniVersion":"0.4.0","name":"test","plugins":[{{"type":"bridge","bridge":"test0","isDefaultGateway":true,"hairpinMode":true,
            "ipam":{{"type":"host-local","dataDir":"{dir}/addresses","ranges":[[{{"subnet":"10.88.0.0/16"}}]]}}}},
            {{"type":"portmap","capabilities":{{"portMappings":true}}}}]}}"#
    )
}

fn ctr(socket: &Path, arguments: &[&str]) -> Result<()> {
    let output = Command::new("ctr")
        .arg("--address")
        .arg(socket)
        .args(arguments)
        .output()
        .context("cannot run ctr")?;
    ensure!(output.status.success(), "ctr {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Builds an archive with one image: busybox and links to it. The default command sleeps forever.
pub fn busybox_image(dir: &Path, name: &str) -> Result<PathBuf> {
    let image_dir = dir.join("image");
    let root = image_dir.join("root");
    for folder in ["bin", "tmp", "etc", "proc", "sys", "dev"] {
        std::fs::create_dir_all(root.join(folder))?;
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox")).context("busybox-static is not installed")?;
    for applet in [
        "sh", "sleep", "cat", "echo", "ls", "env", "wget", "nc", "true", "false", "test", "touch", "rm",
        "id", "hostname", "tar", "mkdir", "dirname", "grep", "head", "mount", "umount", "ps", "kill",
        "mknod", "readlink", "stat", "dd", "tty", "stty", "ln", "chmod", "ip", "unshare", "seq", "sort",
        "tail", "wc", "ping",
    ] {
        let link = root.join("bin").join(applet);
        if !link.is_symlink() {
            std::os::unix::fs::symlink("busybox", link)?;
        }
    }
    std::fs::write(root.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n")?;
    tar(&image_dir.join("layer.tar"), &root)?;
    let digest = Command::new("sha256sum").arg(image_dir.join("layer.tar")).output()?;
    let digest = String::from_utf8(digest.stdout)?.split_whitespace().next().unwrap_or_default().to_owned();
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Cmd":["sleep","1000000"],"Env":["PATH=/bin"]}},"rootfs":{{"type":"layers","diff_ids":["sha256:{digest}"]}},"history":[]}}"#
    );
    let out = image_dir.join("out");
    std::fs::create_dir_all(&out)?;
    std::fs::copy(image_dir.join("layer.tar"), out.join("layer.tar"))?;
    std::fs::write(out.join("config.json"), config)?;
    let manifest = format!(r#"[{{"Config":"config.json","RepoTags":["{name}"],"Layers":["layer.tar"]}}]"#);
    std::fs::write(out.join("manifest.json"), manifest)?;
    let archive = dir.join("image.tar");
    tar(&archive, &out)?;
    Ok(archive)
}

fn tar(archive: &Path, folder: &Path) -> Result<()> {
    let status = Command::new("tar").arg("-cf").arg(archive).arg("-C").arg(folder).arg(".").status()?;
    ensure!(status.success(), "cannot create {}", archive.display());
    Ok(())
}
