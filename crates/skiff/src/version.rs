//! `skiff version`: prints the versions of skiff and Kubernetes and the build.

use crate::flags::{VersionFlags, VersionOutput};

pub fn run(flags: &VersionFlags) -> anyhow::Result<()> {
    let kubernetes = apiserver::version();
    let field = |name: &str| kubernetes[name].as_str().unwrap_or_default().to_owned();
    match flags.output {
        Some(VersionOutput::Json) => {
            let version = serde_json::json!({
                "version": env!("CARGO_PKG_VERSION"),
                "kubernetesVersion": field("gitVersion"),
                "gitCommit": field("gitCommit"),
                "buildDate": field("buildDate"),
                "platform": field("platform"),
            });
            println!("{version:#}");
        }
        None => {
            println!("skiff {}", env!("CARGO_PKG_VERSION"));
            println!("Kubernetes {}", field("gitVersion"));
            println!("commit {}, {}", field("gitCommit"), field("buildDate"));
        }
    }
    Ok(())
}
