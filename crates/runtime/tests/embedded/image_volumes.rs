//! The volumes that an image declares.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use runtime::cri::*;

use crate::kit::{TestNode, TestPod, security, with};
use crate::{image, users};

pub const IMAGE: &str = "volumes:1";
/// Enough files for the copy to take a while.
const FILES: usize = 200;

/// An image with volumes: with files in the image, missing from the image, with an unclean path, and
/// nested.
pub fn import(node: &TestNode) {
    let mut layer = Layer(tar::Builder::new(Vec::new()));
    layer.file("bin/busybox", &std::fs::read("/bin/busybox").unwrap(), 0o755, (0, 0));
    for name in ["sh", "cat", "stat", "touch", "sleep", "ls", "true"] {
        layer.link(&format!("bin/{name}"), "busybox");
    }
    layer.directory("data", 0o1777, (5, 6));
    let mark = [("SCHILY.xattr.user.mark", &b"yes"[..])];
    layer.0.append_pax_extensions(mark).unwrap();
    layer.file("data/file", b"image\n", 0o4710, (33, 44));
    layer.hard_link("data/again", "data/file");
    layer.directory("data/deep", 0o755, (0, 0));
    layer.file("data/deep/inner", b"inner\n", 0o644, (0, 0));
    for at in 0..FILES {
        layer.file(&format!("data/many/{at}"), b"x", 0o644, (0, 0));
    }
    layer.link("elsewhere", "/data/deep");
    layer.link("up", "../../../../../../../..");
    layer.file("mine/file", b"of the image\n", 0o644, (0, 0));
    let volumes = ["/data", "/empty", "relative/../plain", "/mine/", "/data/deep", "/elsewhere", "/up/made"];
    let volumes = volumes.map(|path| format!("{path:?}:{{}}")).join(",");
    let process = format!(r#"{{"Env":["PATH=/bin"],"Volumes":{{{volumes}}}}}"#);
    let archive = image::archive_with(IMAGE, &[layer.0.into_inner().unwrap()], &process);
    ::image::import(node.embedded.images(), std::io::Cursor::new(archive)).unwrap();
}

struct Layer(tar::Builder<Vec<u8>>);

impl Layer {
    fn header(kind: tar::EntryType, mode: u32, (uid, gid): (u64, u64)) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(uid);
        header.set_gid(gid);
        header.set_mtime(1_000_000_000);
        header.set_size(0);
        header
    }

    fn file(&mut self, path: &str, content: &[u8], mode: u32, owner: (u64, u64)) {
        let mut header = Layer::header(tar::EntryType::Regular, mode, owner);
        header.set_size(content.len() as u64);
        self.0.append_data(&mut header, path, content).unwrap();
    }

    fn directory(&mut self, path: &str, mode: u32, owner: (u64, u64)) {
        let mut header = Layer::header(tar::EntryType::Directory, mode, owner);
        self.0.append_data(&mut header, path, std::io::empty()).unwrap();
    }

    fn link(&mut self, path: &str, target: &str) {
        let mut header = Layer::header(tar::EntryType::Symlink, 0o777, (0, 0));
        self.0.append_link(&mut header, path, target).unwrap();
    }

    fn hard_link(&mut self, path: &str, target: &str) {
        let mut header = Layer::header(tar::EntryType::Link, 0o644, (0, 0));
        self.0.append_link(&mut header, path, target).unwrap();
    }
}

fn image_config(text: &str) -> ContainerConfig {
    let mut security = security();
    security.readonly_rootfs = true;
    let mut config = with(security, text);
    config.image = Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() });
    config
}

/// The directory of a container's volumes.
fn volumes_dir(node: &TestNode, pod: &TestPod<'_>, id: &str) -> PathBuf {
    node.dir.path().join("runtime/pods").join(&pod.id).join(id).join("volumes")
}

/// The volume that was copied from the image's `/data`.
fn data_volume(volumes: &Path) -> PathBuf {
    let all = std::fs::read_dir(volumes).unwrap().map(|entry| entry.unwrap().path());
    all.into_iter().find(|volume| volume.join("again").exists()).expect("a copy of /data")
}

pub async fn creates_volumes_declared_by_an_image(node: &TestNode) {
    import(node);
    let host = node.dir.path().join("host");
    std::fs::create_dir_all(&host).unwrap();
    std::fs::write(host.join("file"), "of the host\n").unwrap();
    let mount = |target: &str| Mount {
        container_path: target.into(),
        host_path: host.display().to_string(),
        ..Mount::default()
    };
    let pod = node.pod("volumes").await;
    // A mount at the same path wins, a nested mount is in the volume, and all of it is writable.
    let mut config = image_config(
        "exec 2>&1; cat /data/file /data/deep/inner /mine/file /data/user/file; touch /x; \
         stat -c '%u:%g %a %h %Y' /data/file; stat -c '%u:%g %a' /data /empty /plain; \
         touch /data/new /data/deep/new /empty/new /plain/new && echo written",
    );
    config.mounts = vec![mount("/data/user"), mount("/mine")];
    let expected = "image\ninner\nof the host\nof the host\ntouch: /x: Read-only file system\n\
        33:44 4710 2 1000000000\n5:6 1777\n0:0 755\n0:0 755\n";
    let (_, said) = pod.finish(&config).await;
    assert!(said.starts_with(expected) && said.ends_with("written\n"), "{said}");
    assert!(!host.join("new").exists());
    // Another container gets a new copy, with all metadata.
    let id = pod.start(&image_config("ls /data; echo changed >/data/file; sleep 1000")).await;
    pod.exec(&id, "until test changed = \"$(cat /data/file)\"; do sleep 0.01; done").await;
    let volumes = volumes_dir(node, &pod, &id);
    assert!(!data_volume(&volumes).join("new").exists());
    let mut value = [0; 8];
    // If the filesystem supports user xattrs, the copy has them, too.
    if let Ok(length) = rustix::fs::getxattr(data_volume(&volumes).join("file"), "user.mark", &mut value[..])
    {
        assert_eq!(&value[..length], b"yes");
    }
    // The volumes are deleted with the container.
    node.runtime.remove_container(&id).await.unwrap();
    assert!(!volumes.exists() && !volumes.parent().unwrap().exists());
}

pub async fn volume_symlinks_stay_inside_the_image(node: &TestNode) {
    import(node);
    let pod = node.pod("volume-links").await;
    let text = "cat /elsewhere/inner; touch /up/made/x && ls /made; ls /data/deep; sleep 1000";
    let id = pod.start(&image_config(text)).await;
    let (_, said, _) = pod.exec(&id, "cat /elsewhere/inner; ls -d /made").await;
    assert_eq!(said, "inner\n/made\n");
    assert!(!Path::new("/made").exists());
    // A volume cannot be mounted on a file.
    node.runtime.remove_container(&id).await.unwrap();
    for (path, why) in [
        ("/bin/busybox", "cannot create the image's volume \"/bin/busybox\": not a directory"),
        ("/", "the image declares the volume \"/\", which would hide its whole filesystem"),
    ] {
        let process = format!(r#"{{"Volumes":{{{path:?}:{{}}}}}}"#);
        let mut layer = Layer(tar::Builder::new(Vec::new()));
        layer.file("bin/busybox", b"", 0o755, (0, 0));
        let archive = image::archive_with("odd:1", &[layer.0.into_inner().unwrap()], &process);
        ::image::import(node.embedded.images(), std::io::Cursor::new(archive)).unwrap();
        let mut config = image_config("true");
        config.image = Some(ImageSpec { image: "odd:1".into(), ..ImageSpec::default() });
        config.metadata.get_or_insert_default().name = path.to_owned();
        let error = match node.runtime.create_container(&pod.id, &config, &pod.config).await {
            Ok(id) => node.runtime.start_container(&id).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(error.message().ends_with(why), "{}", error.message());
    }
}

pub async fn volume_owners_are_mapped_for_user_namespaces(node: &TestNode) {
    import(node);
    let pod = users::pod(node, "volume-owners", |_| {}).await;
    let text = "stat -c '%u:%g' /data /data/file /empty /data/deep/inner; touch /data/mine /empty/mine; \
        stat -c '%u:%g' /data/mine /empty/mine";
    assert_eq!(pod.finish(&image_config(text)).await, (0, "5:6\n33:44\n0:0\n0:0\n0:0\n0:0\n".into()));
    // On the host the owners are the mapped ones.
    let id = pod.start(&image_config("sleep 1000")).await;
    let found = std::fs::metadata(data_volume(&volumes_dir(node, &pod, &id)).join("file")).unwrap();
    assert_eq!((found.uid(), found.gid()), (users::FIRST + 33, users::FIRST + 44));
}
