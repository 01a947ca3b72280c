//! Unpacking a layer into a directory that overlayfs can stack.
//!
//! A layer comes from anywhere and may name any path: links of the layer itself and of those below are followed as a
//! process in the container would follow them, never out of the directory. What a layer takes away is written as
//! overlayfs wants it.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use tar::EntryType;

const WHITEOUT: &str = ".wh.";
const OPAQUE: &str = ".wh..wh..opq";
/// As the kernel allows.
const MOST_LINKS: usize = 40;

/// Why a layer cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read it")]
    Read(#[from] io::Error),
    #[error("{}", path.display())]
    Entry { path: PathBuf, source: io::Error },
    #[error("{} leads out of the layer", path.display())]
    Outside { path: PathBuf },
    #[error("too many links on the way to {}", path.display())]
    Links { path: PathBuf },
}

/// What is inside, whichever way it is compressed.
pub fn decompressed(content: impl Read + 'static) -> io::Result<Box<dyn Read>> {
    let mut content = BufReader::with_capacity(64 << 10, content);
    let start = content.fill_buf()?;
    Ok(if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(content))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(Zstd { source: Some(content), frame: None })
    } else {
        Box::new(content)
    })
}

/// One frame after the other, until there are no more.
struct Zstd<R: BufRead> {
    source: Option<R>,
    frame: Option<ruzstd::decoding::StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>,
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(frame) = &mut self.frame {
                match frame.read(buffer)? {
                    0 if !buffer.is_empty() => {
                        self.source = self.frame.take().map(|frame| frame.into_inner())
                    }
                    count => return Ok(count),
                }
            }
            let Some(mut source) = self.source.take() else { return Ok(0) };
            if source.fill_buf()?.is_empty() {
                return Ok(0);
            }
            let frame = ruzstd::decoding::StreamingDecoder::new(source).map_err(io::Error::other)?;
            self.frame = Some(frame);
        }
    }
}

/// Unpacks a layer into `root`, which is made. `below` are the layers it stands on, the nearest first.
pub fn unpack(content: impl Read, root: &Path, below: &[PathBuf]) -> Result<(), Error> {
    fs::create_dir(root)?;
    let layer = Layer { root, below };
    layer.like_below(Path::new(""), root)?;
    // Writing into a directory changes its time, so times of directories come last.
    let mut times = Vec::new();
    let mut archive = tar::Archive::new(content);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let named = entry.path()?.into_owned();
        let failed = |source| Error::Entry { path: named.clone(), source };
        let Some(place) = layer.place(&named)? else {
            if entry.header().entry_type() == EntryType::Directory {
                dress(&mut entry, root).map_err(failed)?;
            }
            continue;
        };
        let name = place.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let parent = place.parent().unwrap_or(root).to_owned();
        if name == OPAQUE {
            rustix::fs::lsetxattr(&parent, c"trusted.overlay.opaque", b"y", XattrFlags::empty())
                .map_err(|error| failed(error.into()))?;
            continue;
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            // `.wh..wh.` is for the programs that make layers.
            if hidden.starts_with(WHITEOUT) || hidden.is_empty() || hidden == "." || hidden == ".." {
                continue;
            }
            let hidden = parent.join(hidden);
            clear(&hidden).map_err(failed)?;
            rustix::fs::mknodat(CWD, &hidden, FileType::CharacterDevice, Mode::empty(), 0)
                .map_err(|error| failed(error.into()))?;
            continue;
        }
        if make(&layer, &mut entry, &place)? {
            dress(&mut entry, &place).map_err(failed)?;
            let mtime = entry.header().mtime().unwrap_or_default();
            match entry.header().entry_type() {
                EntryType::Directory => times.push((place, mtime)),
                _ => set_time(&place, mtime).map_err(failed)?,
            }
        }
    }
    for (place, mtime) in times.iter().rev() {
        // One that a later entry replaced has no time to keep.
        let _ = set_time(place, *mtime);
    }
    Ok(())
}

/// Makes what an entry is; answers whether it is anything that has properties of its own.
fn make(layer: &Layer<'_>, entry: &mut tar::Entry<'_, impl Read>, place: &Path) -> Result<bool, Error> {
    let failed = |source: io::Error| Error::Entry { path: place.to_owned(), source };
    let kind = entry.header().entry_type();
    let node = match kind {
        EntryType::Directory => {
            if fs::symlink_metadata(place).is_ok_and(|found| found.is_dir()) {
                return Ok(true);
            }
            clear(place).map_err(failed)?;
            fs::create_dir(place).map_err(failed)?;
            return Ok(true);
        }
        EntryType::XGlobalHeader | EntryType::XHeader | EntryType::GNULongName | EntryType::GNULongLink => {
            return Ok(false);
        }
        EntryType::Link => {
            let target = entry.link_name()?.unwrap_or_default().into_owned();
            let source = layer.existing(&target)?;
            if source != place {
                clear(place).map_err(failed)?;
                // Not in this layer: it cannot be linked to, only copied.
                if source.starts_with(layer.root) {
                    fs::hard_link(&source, place).map_err(failed)?;
                } else {
                    copy(&source, place).map_err(failed)?;
                }
            }
            return Ok(false);
        }
        EntryType::Symlink => {
            let target = entry.link_name()?.unwrap_or_default().into_owned();
            clear(place).map_err(failed)?;
            std::os::unix::fs::symlink(target, place).map_err(failed)?;
            return Ok(true);
        }
        EntryType::Char => FileType::CharacterDevice,
        EntryType::Block => FileType::BlockDevice,
        EntryType::Fifo => FileType::Fifo,
        // Everything else is to be taken for a file, says the format.
        _ => {
            clear(place).map_err(failed)?;
            let mut file = File::create_new(place).map_err(failed)?;
            io::copy(entry, &mut file).map_err(failed)?;
            return Ok(true);
        }
    };
    clear(place).map_err(failed)?;
    let header = entry.header();
    let number = |value: io::Result<Option<u32>>| value.ok().flatten().unwrap_or_default();
    let device = rustix::fs::makedev(number(header.device_major()), number(header.device_minor()));
    rustix::fs::mknodat(CWD, place, node, Mode::from_raw_mode(0o600), device)
        .map_err(|error| failed(error.into()))?;
    Ok(true)
}

/// Owner, mode and further attributes, in the order in which none undoes another.
fn dress(entry: &mut tar::Entry<'_, impl Read>, place: &Path) -> io::Result<()> {
    let header = entry.header();
    let id = |value: io::Result<u64>| u32::try_from(value.unwrap_or_default()).unwrap_or_default();
    let (uid, gid) = (Uid::from_raw(id(header.uid())), Gid::from_raw(id(header.gid())));
    rustix::fs::chownat(CWD, place, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    let is_link = header.entry_type() == EntryType::Symlink;
    let mode = header.mode().unwrap_or(0o755);
    if !is_link {
        fs::set_permissions(place, fs::Permissions::from_mode(mode & 0o7777))?;
    }
    let Some(extensions) = entry.pax_extensions()? else { return Ok(()) };
    for extension in extensions.flatten() {
        let Some(name) = extension.key().ok().and_then(|key| key.strip_prefix("SCHILY.xattr.")) else {
            continue;
        };
        // What overlayfs believes is for us to say.
        if name.starts_with("trusted.overlay.") {
            continue;
        }
        match rustix::fs::lsetxattr(place, name, extension.value_bytes(), XattrFlags::empty()) {
            // Labels of a security module that is not here, or a file system without any.
            Err(rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM)
                if !name.starts_with("security.capability") => {}
            other => other?,
        }
    }
    Ok(())
}

fn set_time(place: &Path, seconds: u64) -> io::Result<()> {
    let time = Timespec { tv_sec: i64::try_from(seconds).unwrap_or_default(), tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Makes room for something else.
fn clear(place: &Path) -> io::Result<()> {
    match fs::symlink_metadata(place) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(place),
        Ok(_) => fs::remove_file(place),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn copy(source: &Path, place: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(source)?;
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "a link to what is not a file"));
    }
    fs::copy(source, place)?;
    std::os::unix::fs::chown(place, Some(found.uid()), Some(found.gid()))?;
    fs::set_permissions(place, found.permissions())
}

/// A layer being unpacked and what is under it.
struct Layer<'a> {
    root: &'a Path,
    below: &'a [PathBuf],
}

impl Layer<'_> {
    /// Where an entry belongs: the directories on the way are there, and are directories. None for the root itself.
    fn place(&self, named: &Path) -> Result<Option<PathBuf>, Error> {
        let parts = parts(named)?;
        let Some((name, directories)) = parts.split_last() else { return Ok(None) };
        let parent = self.directory(named, directories.to_vec())?;
        Ok(Some(self.root.join(parent).join(name)))
    }

    /// Follows and makes directories; answers the path without links, from the root.
    fn directory(&self, named: &Path, mut todo: Vec<PathBuf>) -> Result<PathBuf, Error> {
        todo.reverse();
        let mut done = PathBuf::new();
        let mut links = 0;
        while let Some(part) = todo.pop() {
            if part == Path::new("..") {
                done.pop();
                continue;
            }
            let next = done.join(&part);
            let here = self.root.join(&next);
            let link = match fs::symlink_metadata(&here) {
                Ok(found) if found.is_dir() => None,
                Ok(found) if found.is_symlink() => Some(fs::read_link(&here)?),
                // A file on the way gives way to a directory.
                Ok(_) => {
                    clear(&here)?;
                    fs::create_dir(&here)?;
                    None
                }
                Err(_) => match self.find_below(&next) {
                    Some(below) if below.is_symlink() => Some(fs::read_link(below)?),
                    _ => {
                        fs::create_dir(&here)?;
                        self.like_below(&next, &here)?;
                        None
                    }
                },
            };
            let Some(target) = link else {
                done = next;
                continue;
            };
            links += 1;
            if links > MOST_LINKS {
                return Err(Error::Links { path: named.to_owned() });
            }
            if target.is_absolute() {
                done = PathBuf::new();
            }
            for component in target.components().rev() {
                match component {
                    Component::Normal(part) => todo.push(part.into()),
                    Component::ParentDir => todo.push("..".into()),
                    _ => {}
                }
            }
        }
        Ok(done)
    }

    /// A file of this layer or of one below.
    fn existing(&self, named: &Path) -> Result<PathBuf, Error> {
        let place = self.place(named)?.ok_or_else(|| Error::Outside { path: named.to_owned() })?;
        if fs::symlink_metadata(&place).is_ok() {
            return Ok(place);
        }
        let relative = place.strip_prefix(self.root).unwrap_or(&place);
        let missing = || Error::Entry { path: named.to_owned(), source: io::ErrorKind::NotFound.into() };
        self.find_below(relative).ok_or_else(missing)
    }

    /// What the layers below show at a path without links. Never looks through a link of one of them: it would lead to
    /// the host's files.
    fn find_below(&self, relative: &Path) -> Option<PathBuf> {
        for layer in self.below {
            let mut path = layer.clone();
            let mut parts = relative.components().peekable();
            let mut hides_the_rest = false;
            loop {
                let Some(part) = parts.next() else { return Some(path) };
                path.push(part);
                let Ok(found) = fs::symlink_metadata(&path) else { break };
                if parts.peek().is_none() {
                    let is_whiteout = found.mode() & 0o170_000 == 0o020_000 && found.rdev() == 0;
                    return (!is_whiteout).then_some(path);
                }
                if !found.is_dir() {
                    return None;
                }
                let opaque = rustix::fs::lgetxattr(&path, c"trusted.overlay.opaque", &mut [0u8; 1][..]);
                hides_the_rest |= opaque.is_ok();
            }
            if hides_the_rest {
                return None;
            }
        }
        None
    }

    /// A directory that a layer only passes through is as it was.
    fn like_below(&self, relative: &Path, made: &Path) -> io::Result<()> {
        let found = self.find_below(relative).and_then(|path| fs::symlink_metadata(path).ok());
        match found.filter(fs::Metadata::is_dir) {
            Some(found) => {
                std::os::unix::fs::chown(made, Some(found.uid()), Some(found.gid()))?;
                fs::set_permissions(made, found.permissions())
            }
            None => fs::set_permissions(made, fs::Permissions::from_mode(0o755)),
        }
    }
}

/// The parts of a path inside a layer.
fn parts(named: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut parts = Vec::new();
    for component in named.components() {
        match component {
            Component::Normal(part) => parts.push(PathBuf::from(part)),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Error::Outside { path: named.to_owned() });
            }
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests;
