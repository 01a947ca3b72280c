//! `skiff image`: the images of the runtime in use.

use anyhow::Context as _;
use runtime::cri::ImageSpec;
use runtime::{Remote, Runtime as _};

use crate::containerd;
use crate::flags::{ImageAction, ImageFlags};

pub fn run(flags: &ImageFlags) -> anyhow::Result<()> {
    let socket = flags.container_runtime_endpoint.clone().or_else(|| containerd::running(&flags.data_dir));
    let socket = socket.context("no container runtime answers: is the server running?")?;
    if let ImageAction::Import { files } = &flags.action {
        for file in files {
            print!("{}", containerd::import(&socket, file)?);
        }
        return Ok(());
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let runtime = Remote::new(&socket);
        match &flags.action {
            ImageAction::Rm { names } => {
                for name in names {
                    runtime.remove_image(&ImageSpec { image: name.clone(), ..ImageSpec::default() }).await?;
                }
            }
            _ => {
                let mut rows: Vec<(String, String, u64)> = Vec::new();
                for image in runtime.images().await? {
                    let id = image.id.trim_start_matches("sha256:").chars().take(12).collect::<String>();
                    let names =
                        if image.repo_tags.is_empty() { vec!["<none>".into()] } else { image.repo_tags };
                    rows.extend(names.into_iter().map(|name| (name, id.clone(), image.size)));
                }
                rows.sort();
                let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0).max(5);
                println!("{:width$}  {:12}  SIZE", "IMAGE", "ID");
                for (name, id, size) in rows {
                    println!("{name:width$}  {id:12}  {:.1} MB", size as f64 / 1e6);
                }
            }
        }
        Ok(())
    })
}
