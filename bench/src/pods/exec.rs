//! Runs a command in a container over WebSocket. The measured time is from the connection to the
//! command's exit status.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::client::Target;

const EXEC_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Runs the command of an exec request. It must succeed.
pub async fn run(target: &Target, path: &str) -> Result<()> {
    tokio::time::timeout(EXEC_TIMEOUT, exchange(target, path)).await.context("exec timed out")?
}

async fn exchange(target: &Target, path: &str) -> Result<()> {
    let mut stream = target.dial_http1().await?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Sec-WebSocket-Protocol: v5.channel.k8s.io, v4.channel.k8s.io, channel.k8s.io\r\n\r\n",
        target.address()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut received = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).await?;
        received.extend_from_slice(&buffer[..count]);
        ensure!(received.len() < MAX_RESPONSE_BYTES, "the command has unexpected output");
        let text = String::from_utf8_lossy(&received);
        // The last message is a Status on the error channel.
        if text.contains(r#""status":"Success""#) {
            return Ok(());
        }
        if count == 0 || text.contains(r#""status":"Failure""#) {
            bail!("the command failed: {text}");
        }
    }
}
