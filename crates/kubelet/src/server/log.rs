//! `/containerLogs`: sends the log of a container up to its end, or follows it for as long as the
//! container runs.
//!
//! The file is read in chunks as the client consumes them. Following waits for changes of the
//! directory and of the runtime's containers, and ends with the container or with the client.

mod lines;

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::unfold;
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Key, Object as _};
use runtime::cri;
use tokio::sync::{mpsc, watch};

use super::log_target::container_id_for_logs;
use super::request::QueryFlags;
use super::{Body, HttpError, find_pod, text};
use crate::Node;
use crate::dir_watcher::DirWatcher;
use lines::{LogParser, tail_offset};

/// Bytes per read.
const CHUNK_BYTES: usize = 64 << 10;
/// The number of chunks that are read ahead of the client.
const READ_AHEAD_CHUNKS: usize = 2;

/// The query parameters; upstream's `PodLogOptions`.
#[derive(Debug, Default, PartialEq)]
pub struct PodLogOptions {
    follow: bool,
    previous: bool,
    timestamps: bool,
    since: Option<Timestamp>,
    tail: Option<u64>,
    limit: Option<u64>,
}

impl PodLogOptions {
    fn parse(query: &str, now: Timestamp) -> Result<PodLogOptions, HttpError> {
        let bad = || (StatusCode::BAD_REQUEST, r#"{"message": "Unable to decode query."}"#.to_owned());
        let invalid = || (StatusCode::UNPROCESSABLE_ENTITY, r#"{"message": "Invalid request."}"#.to_owned());
        let flags = QueryFlags::of(query);
        let number = |name: &str| match flags.get(name) {
            "" => Ok(None),
            text => text.parse::<i64>().map_err(|_| bad()).map(Some),
        };
        let count = |name: &str, minimum: i64| match number(name)? {
            Some(number) if number < minimum => Err(invalid()),
            number => Ok(number.map(i64::unsigned_abs)),
        };
        let since = match (count("sinceSeconds", 1)?, flags.get("sinceTime")) {
            (None, "") => None,
            (Some(_), time) if !time.is_empty() => return Err(invalid()),
            (Some(seconds), _) => {
                let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
                now.checked_sub(SignedDuration::from_secs(seconds)).ok()
            }
            (None, time) => Some(time.parse().map_err(|_| bad())?),
        };
        Ok(PodLogOptions {
            follow: flags.is_set("follow"),
            previous: flags.is_set("previous"),
            timestamps: flags.is_set("timestamps"),
            since,
            tail: count("tailLines", 0)?,
            limit: count("limitBytes", 1)?,
        })
    }
}

pub async fn handle_logs(
    node: &Arc<Node>,
    pod: &Key,
    container: &str,
    query: &str,
) -> Result<Response<Body>, HttpError> {
    let options = PodLogOptions::parse(query, node.ctx.clock.now())?;
    let pod = find_pod(node, pod)?;
    if !has_container(&pod, container) {
        let message = format!("container {container:?} not found in pod {:?}", pod.name());
        return Err((StatusCode::NOT_FOUND, message));
    }
    let container_uri = container_id_for_logs(&pod, container, options.previous)
        .map_err(|message| (StatusCode::BAD_REQUEST, message))?;
    let id = container_uri.split_once("://").map_or(container_uri.as_str(), |(_, id)| id).to_owned();
    // Subscribes before the status is read, so that no change is missed.
    let runtime_changes = node.runtime_changes.subscribe();
    let Ok(status) = node.runtime.container_status(&id).await else {
        return Ok(text(StatusCode::OK, format!("unable to retrieve container logs for {container_uri}")));
    };
    let attempt = status.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
    let dir = node.settings.log_dir(&pod.key(), pod.uid());
    let path = dir.join(crate::config::log_path(container, attempt));
    let mut log = match LogReader::open(path.clone(), &options) {
        Ok(log) => log,
        Err(error) => {
            let message = format!("failed to try resolving symlinks in path {:?}: {error}", path.display());
            return Ok(text(StatusCode::OK, message));
        }
    };
    let running = is_running(&status);
    let (chunks, receiver) = mpsc::channel(READ_AHEAD_CHUNKS);
    let node = node.clone();
    tokio::spawn(async move {
        let sent = match options.follow && running {
            true => follow(&node, &id, runtime_changes, &mut log, &chunks).await,
            false => send(&mut log, &chunks).await,
        };
        if let Err(error) = sent {
            tracing::debug!(%error, path = %log.path.display(), "cannot read the rest of a container log");
        }
    });
    let frames = unfold(receiver, |mut receiver| async {
        let chunk: Bytes = receiver.recv().await?;
        Some((Ok(Frame::data(chunk)), receiver))
    });
    Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
}

fn has_container(pod: &Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str());
    let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    all.map(|container| container.name.as_str()).chain(ephemeral).any(|known| known == name)
}

fn is_running(status: &cri::ContainerStatus) -> bool {
    matches!(status.state(), cri::ContainerState::Running | cri::ContainerState::Created)
}

/// Sends what the log contains now. Returns `Ok(false)` if nothing more has to be sent.
async fn send(log: &mut LogReader, chunks: &mpsc::Sender<Bytes>) -> io::Result<bool> {
    loop {
        match log.read()? {
            LogChunk::End => return Ok(!log.lines.is_done()),
            LogChunk::Data(bytes) if bytes.is_empty() => {}
            LogChunk::Data(bytes) => {
                if chunks.send(bytes).await.is_err() {
                    return Ok(false);
                }
            }
        }
    }
}

/// Sends the log and all additions, until the container has ended or the client is gone.
async fn follow(
    node: &Node,
    id: &str,
    mut runtime_changes: watch::Receiver<u64>,
    log: &mut LogReader,
    chunks: &mpsc::Sender<Bytes>,
) -> io::Result<bool> {
    let changes = DirWatcher::new(log.path.parent().unwrap_or(Path::new("/")))?;
    loop {
        if !send(log, chunks).await? {
            return Ok(false);
        }
        if log.reopen()? {
            continue;
        }
        tokio::select! {
            changed = changes.next() => changed?,
            () = chunks.closed() => return Ok(false),
            changed = runtime_changes.changed() => {
                let status = node.runtime.container_status(id).await;
                if changed.is_err() || !status.is_ok_and(|status| is_running(&status)) {
                    // The runtime has written the last output before it reports the exit.
                    return send(log, chunks).await;
                }
            }
        }
    }
}

/// A log file that is being read.
struct LogReader {
    path: PathBuf,
    file: File,
    lines: LogParser,
    buffer: Vec<u8>,
}

enum LogChunk {
    Data(Bytes),
    End,
}

impl LogReader {
    fn open(path: PathBuf, options: &PodLogOptions) -> io::Result<LogReader> {
        let mut file = File::open(&path)?;
        if let Some(count) = options.tail {
            let start = tail_offset(&mut file, count)?;
            file.seek(SeekFrom::Start(start))?;
        }
        let lines = LogParser::new(options.since, options.timestamps, options.limit);
        Ok(LogReader { path, file, lines, buffer: vec![0; CHUNK_BYTES] })
    }

    fn read(&mut self) -> io::Result<LogChunk> {
        if self.lines.is_done() {
            return Ok(LogChunk::End);
        }
        let count = self.file.read(&mut self.buffer)?;
        if count == 0 {
            return Ok(LogChunk::End);
        }
        Ok(LogChunk::Data(self.lines.process(&self.buffer[..count]).into()))
    }

    /// Continues with the new file if the log was rotated. Returns whether it was.
    fn reopen(&mut self) -> io::Result<bool> {
        let Ok(now) = std::fs::metadata(&self.path) else { return Ok(false) };
        let known = self.file.metadata()?;
        let rotated = (now.ino(), now.dev()) != (known.ino(), known.dev());
        if rotated {
            self.file = File::open(&self.path)?;
        }
        Ok(rotated)
    }
}

#[cfg(test)]
mod tests;
