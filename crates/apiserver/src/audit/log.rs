//! Audit log backend: a dedicated thread writes events to a file and rotates it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;

use super::EncodedEvent;

/// The `--audit-log-*` flags.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// `-` for standard output.
    pub path: PathBuf,
    /// Size limit in megabytes; 0 disables rotation.
    pub max_size: u64,
    /// Number of rotated files to keep; 0 keeps all.
    pub max_backups: usize,
    /// Days to keep rotated files; 0 keeps them forever.
    pub max_age: u64,
    pub json: bool,
    pub mode: super::Mode,
}

const SIZE_UNIT_BYTES: u64 = 1 << 20;
/// Upper bound for events per write.
const MAX_BATCH_EVENTS: usize = 1000;
/// Timestamp in the names of rotated files, as lumberjack has it.
const BACKUP_TIME_FORMAT: &str = "%Y-%m-%dT%H-%M-%S%.3f";

/// Starts the writer thread, which ends when all senders are dropped.
pub fn start(options: &LogOptions) -> io::Result<mpsc::Sender<EncodedEvent>> {
    let mut out: Box<dyn LogWriter> = match options.path.to_str() {
        Some("-") => Box::new(PlainWriter(io::stdout())),
        _ => Box::new(RotatedFile::open(options)?),
    };
    let (sender, mut lines) = mpsc::channel::<EncodedEvent>(super::EVENT_BUFFER_SIZE);
    std::thread::Builder::new().name("audit-log".into()).spawn(move || {
        while let Some(first) = lines.blocking_recv() {
            // Write everything that is queued in one batch.
            let more = std::iter::from_fn(|| lines.try_recv().ok()).take(MAX_BATCH_EVENTS);
            let batch: Vec<EncodedEvent> = std::iter::once(first).chain(more).collect();
            let good = out.write_batch(&batch).inspect_err(|error| {
                tracing::error!(%error, lost = batch.len(), "cannot write the audit log");
            });
            for done in batch.into_iter().filter_map(|line| line.done) {
                let _ = done.send(good.is_ok());
            }
        }
    })?;
    Ok(sender)
}

trait LogWriter: Send {
    fn write_batch(&mut self, lines: &[EncodedEvent]) -> io::Result<()>;
}

struct PlainWriter<W>(W);

impl<W: Write + Send> LogWriter for PlainWriter<W> {
    fn write_batch(&mut self, lines: &[EncodedEvent]) -> io::Result<()> {
        lines.iter().try_for_each(|line| self.0.write_all(&line.bytes))?;
        self.0.flush()
    }
}

/// A file that is rotated before it exceeds its size limit.
struct RotatedFile {
    options: LogOptions,
    file: File,
    size: u64,
}

impl RotatedFile {
    fn open(options: &LogOptions) -> io::Result<RotatedFile> {
        if let Some(parent) = options.path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        let file = append(&options.path)?;
        let size = file.metadata()?.len();
        Ok(RotatedFile { options: options.clone(), file, size })
    }

    fn rotate(&mut self, now: Timestamp) -> io::Result<()> {
        let path = &self.options.path;
        std::fs::rename(path, backup_name(path, now))?;
        self.file = append(path)?;
        self.size = 0;
        for old in surplus(backups(path), &self.options, now) {
            std::fs::remove_file(old)?;
        }
        Ok(())
    }
}

impl LogWriter for RotatedFile {
    fn write_batch(&mut self, lines: &[EncodedEvent]) -> io::Result<()> {
        let limit = self.options.max_size.saturating_mul(SIZE_UNIT_BYTES);
        let mut buffer = Vec::new();
        for line in lines {
            let size = line.bytes.len() as u64;
            if limit > 0 && self.size > 0 && self.size + size > limit {
                self.file.write_all(&std::mem::take(&mut buffer))?;
                self.rotate(Timestamp::now())?;
            }
            buffer.extend_from_slice(&line.bytes);
            self.size += size;
        }
        self.file.write_all(&buffer)
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// `audit.log` is moved to `audit-2026-01-02T03-04-05.678.log`.
fn backup_name(path: &Path, now: Timestamp) -> PathBuf {
    let (base, extension) = parts(path);
    path.with_file_name(format!("{base}-{}{extension}", now.strftime(BACKUP_TIME_FORMAT)))
}

fn parts(path: &Path) -> (String, String) {
    let base = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let extension = path.extension().map_or_else(String::new, |e| format!(".{}", e.to_string_lossy()));
    (base, extension)
}

/// Rotated files with their timestamps, newest first.
fn backups(path: &Path) -> Vec<(Timestamp, PathBuf)> {
    let (base, extension) = parts(path);
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut found: Vec<(Timestamp, PathBuf)> = std::fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let stamp = name.strip_prefix(&format!("{base}-"))?.strip_suffix(&extension)?.to_owned();
            let time = jiff::civil::DateTime::strptime(BACKUP_TIME_FORMAT, &stamp).ok()?;
            Some((time.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp(), entry.path()))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found
}

/// Rotated files beyond the number or age limit.
fn surplus(backups: Vec<(Timestamp, PathBuf)>, options: &LogOptions, now: Timestamp) -> Vec<PathBuf> {
    let max = if options.max_backups == 0 { usize::MAX } else { options.max_backups };
    let oldest = Duration::from_secs(options.max_age.saturating_mul(24 * 3600));
    let cutoff = now.checked_sub(oldest).unwrap_or(Timestamp::MIN);
    let too_old = |time: &Timestamp| options.max_age > 0 && *time < cutoff;
    let surplus = backups.into_iter().enumerate().filter(|(i, (time, _))| *i >= max || too_old(time));
    surplus.map(|(_, (_, path))| path).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tokio::sync::oneshot;

    use super::*;

    fn options(path: PathBuf, max_backups: usize) -> LogOptions {
        LogOptions {
            path,
            max_size: 1,
            max_backups,
            max_age: 30,
            json: true,
            mode: super::super::Mode::Batch,
        }
    }

    #[test]
    fn full_file_is_rotated_and_expired_backups_are_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/audit.log");
        let expired_backup = dir.path().join("new/audit-2020-01-01T00-00-00.000.log");
        let sender = start(&options(path.clone(), 2)).unwrap();
        std::fs::write(&expired_backup, "x").unwrap();
        std::fs::write(dir.path().join("new/audit-notes.log"), "x").unwrap();
        for i in 0..50 {
            let (written, done) = oneshot::channel();
            let bytes = vec![b'a' + i % 26; 100_000];
            sender.blocking_send(EncodedEvent { bytes, done: Some(written) }).unwrap();
            assert!(done.blocking_recv().unwrap());
        }
        let remaining = backups(&path);
        assert_eq!(remaining.len(), 2, "{remaining:?}");
        assert!(remaining.iter().all(|(_, path)| std::fs::metadata(path).unwrap().len() <= SIZE_UNIT_BYTES));
        assert!(!expired_backup.exists() && dir.path().join("new/audit-notes.log").exists());
        assert!(std::fs::metadata(&path).unwrap().len() <= SIZE_UNIT_BYTES);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn new_events_follow_existing_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        std::fs::write(&path, "before\n").unwrap();
        let sender = start(&options(path.clone(), 0)).unwrap();
        let (written, done) = oneshot::channel();
        sender.blocking_send(EncodedEvent { bytes: b"after\n".to_vec(), done: Some(written) }).unwrap();
        assert!(done.blocking_recv().unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\nafter\n");
        assert!(start(&options(dir.path().join("audit.log/x"), 0)).is_err());
    }
}
