//! `skiff image`: manages the container images of this node.
//!
//! The data directory records which runtime the node uses. Images of the embedded runtime are files
//! that any process may change, whether the server runs or not. Other runtimes are accessed over their
//! CRI socket.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use image::Store;
use runtime::cri::{ImageSpec, PodSandboxConfig};
use runtime::{Remote, Runtime as _};

use crate::flags::{DATA_DIR, ImageAction, ImageFlags};
use crate::running::{self, RunningNode};
use crate::{containerd, node};

/// Name, ID and size in bytes.
type ImageRow = (String, String, u64);

pub fn run(flags: &ImageFlags) -> anyhow::Result<()> {
    let endpoint_flag = flags.container_runtime_endpoint.clone();
    let data_dir = match (&flags.data_dir, &endpoint_flag) {
        (Some(data_dir), _) => data_dir.clone(),
        (None, Some(_)) => PathBuf::from(DATA_DIR),
        (None, None) => {
            let chosen = choose_data_dir(&running::nodes()?)?;
            if chosen != Path::new(DATA_DIR) {
                eprintln!("using the data directory of the running node: {}", chosen.display());
            }
            chosen
        }
    };
    if endpoint_flag.is_none() && !data_dir.is_dir() {
        anyhow::bail!(
            "no node runs on this host, and {} does not exist: name the data directory of the server or agent with \
             --data-dir",
            data_dir.display()
        );
    }
    let endpoint = match endpoint_flag {
        Some(endpoint) => Some(endpoint),
        None => node::recorded_runtime_endpoint(&data_dir)?,
    };
    let socket = match endpoint {
        None => return run_embedded(&data_dir, &flags.action),
        Some(name) if name == node::CONTAINERD_ENDPOINT => containerd::running_socket(&data_dir)
            .context("cannot connect to containerd: is the server running?")?,
        Some(socket) => socket,
    };
    let path = socket.trim_start_matches("unix://");
    UnixStream::connect(path).with_context(|| {
        format!("cannot connect to the node's container runtime at {path}: is it running?")
    })?;
    run_cri(path, &flags.action)
}

/// The data directory of the only node that runs on this host; the default one if none runs.
fn choose_data_dir(nodes: &[RunningNode]) -> anyhow::Result<PathBuf> {
    let known: BTreeSet<&Path> = nodes.iter().filter_map(|node| node.data_dir.as_deref()).collect();
    match known.len() {
        0 => Ok(PathBuf::from(DATA_DIR)),
        1 => Ok(known.into_iter().collect()),
        _ => {
            let all: Vec<String> = known.iter().map(|dir| dir.display().to_string()).collect();
            anyhow::bail!("several nodes run on this host, name one with --data-dir: {}", all.join(", "))
        }
    }
}

fn run_embedded(data_dir: &Path, action: &ImageAction) -> anyhow::Result<()> {
    let root = node::runtime_dir(data_dir);
    let store = Store::open(&root.join("images"))?;
    match action {
        ImageAction::Import { files } => {
            for path in files {
                let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
                let images = image::import(&store, file);
                if images.is_err() {
                    // Removes the layers of the failed import. If this fails as well, a later garbage
                    // collection removes them.
                    let _ = collect_garbage(&store, &root, |_, _| false);
                }
                for image in images.with_context(|| format!("cannot import {}", path.display()))? {
                    if image.names().next().is_none() {
                        println!("{}", image.id);
                    }
                    image.names().for_each(|name| println!("{name}"));
                }
            }
        }
        ImageAction::Export { file, names } => {
            let output = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
            let written = image::export(&store, names, std::io::BufWriter::new(output));
            written.with_context(|| format!("cannot export to {}", file.display()))?;
        }
        ImageAction::Pull { registries, names } => {
            let settings = image::pull::RegistrySettings::read(&registries.file(data_dir));
            let settings = settings.map_err(anyhow::Error::msg)?;
            let settings = settings.mirrors_only(registries.disable_default_registry_endpoint);
            let puller = image::pull::Puller::new(store, settings);
            let executor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            for name in names {
                let pulled = executor.block_on(puller.pull(&image::Reference::parse(name)?, None));
                println!("{}", pulled.with_context(|| format!("cannot pull {name}"))?.id);
            }
        }
        ImageAction::Rm { names } => {
            for name in names {
                anyhow::ensure!(store.remove(name)?, "there is no image {name}");
            }
            collect_garbage(&store, &root, |_, _| false)?;
        }
        ImageAction::Gc { all } => {
            let unused = |image: &image::Image, in_use: &BTreeSet<String>| {
                *all && !image.layers.iter().all(|layer| in_use.contains(layer))
            };
            println!("freed {:.1} MB", collect_garbage(&store, &root, unused)? as f64 / 1e6);
        }
        ImageAction::Ls => {
            let row = |image: image::Image| {
                let id = &image.id.hex()[..12];
                let no_name = image.names().next().is_none().then_some("<none>");
                let row = |name: &str| (name.to_owned(), id.to_owned(), image.size);
                image.names().chain(no_name).map(row).collect::<Vec<ImageRow>>()
            };
            print(store.images()?.into_iter().flat_map(row).collect());
        }
    }
    Ok(())
}

/// Removes unused content. The layers in use are read from the container records; nothing is removed if
/// one of these cannot be read.
fn collect_garbage(
    store: &image::Store,
    root: &Path,
    unused: impl Fn(&image::Image, &BTreeSet<String>) -> bool,
) -> anyhow::Result<u64> {
    let in_use = || runtime::embedded::layers_in_use(root);
    let deleted_bytes = store.collect_garbage(in_use, unused)?;
    deleted_bytes.context("an image or container is being created: try again later")
}

fn run_cri(socket: &str, action: &ImageAction) -> anyhow::Result<()> {
    match action {
        ImageAction::Import { files } => {
            for file in files {
                print!("{}", containerd::import(socket, file)?);
            }
            return Ok(());
        }
        ImageAction::Export { file, names } => return containerd::export(socket, file, names),
        _ => {}
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let runtime = Remote::new(socket);
        let spec = |name: &String| ImageSpec { image: name.clone(), ..ImageSpec::default() };
        match action {
            ImageAction::Rm { names } => {
                for name in names {
                    anyhow::ensure!(runtime.image(&spec(name)).await?.is_some(), "there is no image {name}");
                    runtime.remove_image(&spec(name)).await?;
                }
            }
            ImageAction::Pull { names, .. } => {
                for name in names {
                    let pulled = runtime.pull(&spec(name), None, &PodSandboxConfig::default()).await;
                    println!("{}", pulled.with_context(|| format!("cannot pull {name}"))?);
                }
            }
            ImageAction::Ls => {
                let mut rows: Vec<ImageRow> = Vec::new();
                for image in runtime.images().await? {
                    let id = image.id.trim_start_matches("sha256:").chars().take(12).collect::<String>();
                    let names =
                        if image.repo_tags.is_empty() { vec!["<none>".into()] } else { image.repo_tags };
                    rows.extend(names.into_iter().map(|name| (name, id.clone(), image.size)));
                }
                print(rows);
            }
            _ => anyhow::bail!("not supported with a CRI runtime: use its own tools"),
        }
        Ok(())
    })
}

fn print(mut rows: Vec<ImageRow>) {
    rows.sort();
    let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0).max(5);
    println!("{:width$}  {:12}  SIZE", "IMAGE", "ID");
    for (name, id, size) in rows {
        println!("{name:width$}  {id:12}  {:.1} MB", size as f64 / 1e6);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_to_data_dir_of_the_running_node() {
        let check = |dirs: &[&str], expected: Result<&str, &str>| {
            let node = |dir: &&str| RunningNode {
                pid: 1,
                role: "server".to_owned(),
                data_dir: Some(*dir).filter(|dir| !dir.is_empty()).map(PathBuf::from),
            };
            let nodes: Vec<RunningNode> = dirs.iter().map(node).collect();
            let found = choose_data_dir(&nodes).map_err(|error| error.to_string());
            let expected = expected.map(PathBuf::from).map_err(str::to_owned);
            assert_eq!(found, expected, "{dirs:?}");
        };
        check(&[], Ok("/var/lib/skiff"));
        check(&[""], Ok("/var/lib/skiff"));
        check(&["/data"], Ok("/data"));
        check(&["/data", "", "/data"], Ok("/data"));
        check(&["/b", "/a"], Err("several nodes run on this host, name one with --data-dir: /a, /b"));
    }
}
