//! Unpacks a layer into a directory that is usable as an overlayfs lower layer.
//!
//! Layers are untrusted and may contain any path. Symlinks of the layer and of the layers below are
//! resolved relative to the layer root, as in a chroot, and never lead out of it. Whiteouts of the
//! OCI format are converted to overlayfs whiteouts and opaque directories.

mod pax;
mod sparse;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use tar::EntryType;

pub(crate) use pax::PaxEscapeReader;
use sparse::SparseFile;

const WHITEOUT: &[u8] = b".wh.";
const WHITEOUT_OPAQUE: &[u8] = b".wh..wh..opq";
/// The symlink limit of the Linux kernel.
const MAX_SYMLINKS: usize = 40;

/// The reason why a layer cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the layer")]
    Read(#[from] io::Error),
    #[error("{}", path.display())]
    Entry { path: PathBuf, source: io::Error },
    #[error("{} is outside the layer root", path.display())]
    Outside { path: PathBuf },
    #[error("too many symlinks in path {}", path.display())]
    Links { path: PathBuf },
}

/// Decompresses gzip and zstd. The format is detected by its magic number; other content is
/// returned unchanged.
pub fn decompress(content: impl Read + 'static) -> io::Result<Box<dyn Read>> {
    let mut content = BufReader::with_capacity(64 << 10, content);
    let start = content.fill_buf()?;
    Ok(if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(content))
    } else if matches!(start, [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]) {
        Box::new(ZstdReader { source: content, frame: FrameDecoder::new(), is_open: false })
    } else {
        Box::new(content)
    })
}

/// Reads a sequence of zstd frames. Skippable frames are ignored; podman stores metadata of the
/// layer in them (zstd:chunked).
struct ZstdReader<R: BufRead> {
    source: R,
    frame: FrameDecoder,
    /// Whether the current frame may have more data.
    is_open: bool,
}

impl<R: BufRead> ZstdReader<R> {
    /// Advances to the next data frame. Returns false at the end of the input.
    fn open(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.frame.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.is_open {
                self.is_open = self.open()?;
                if !self.is_open {
                    return Ok(0);
                }
            }
            while self.frame.can_collect() == 0 && !self.frame.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, one).map_err(io::Error::other)?;
            }
            match self.frame.read(buffer)? {
                0 => self.is_open = false,
                count => return Ok(count),
            }
        }
    }
}

/// Unpacks a layer into `root`, which must not exist. `below` are the layers under it, nearest
/// first.
pub fn unpack(content: impl Read, root: &Path, below: &[PathBuf]) -> Result<(), Error> {
    fs::create_dir(root)?;
    let layer = Layer { root, all: [&[root.to_owned()], below].concat() };
    copy_directory_metadata(layer.find_below(Path::new("")), root)?;
    // Creating entries changes the mtime of their directory, so the times of directories are set
    // last.
    let mut times = Vec::new();
    let mut archive = tar::Archive::new(pax::PaxEscapeReader::new(content));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let mut sparse = SparseFile::from_records(pax::records(&mut entry)?)?;
        let inside = sparse.as_mut().and_then(|sparse| sparse.name.take());
        let named = match inside.map_or_else(|| pax_path(&mut entry, "path"), |name| Ok(Some(name)))? {
            Some(path) => path,
            None => entry.path()?.into_owned(),
        };
        let failed = |source| Error::Entry { path: named.clone(), source };
        let Some(destination) = layer.resolve_destination(&named)? else {
            if entry.header().entry_type() == EntryType::Directory {
                apply_metadata(&mut entry, root).map_err(failed)?;
            }
            continue;
        };
        let name = destination.file_name().unwrap_or_default().as_bytes();
        let parent = destination.parent().unwrap_or(root);
        if name == WHITEOUT_OPAQUE {
            set_opaque(parent).map_err(failed)?;
            continue;
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            // Entries with the prefix `.wh..wh.` are metadata of aufs, such as hard link
            // directories.
            if !(hidden.starts_with(WHITEOUT) || matches!(hidden, b"" | b"." | b"..")) {
                layer.whiteout(&parent.join(OsStr::from_bytes(hidden))).map_err(failed)?;
            }
            continue;
        }
        if create_entry(&layer, &mut entry, &destination, sparse)? {
            apply_metadata(&mut entry, &destination).map_err(failed)?;
            let mtime = entry.header().mtime().unwrap_or_default();
            match entry.header().entry_type() {
                EntryType::Directory => times.push((destination, mtime)),
                _ => set_time(&destination, mtime).map_err(failed)?,
            }
        }
    }
    for (destination, mtime) in times.iter().rev() {
        // A later entry may have replaced the directory, then there is no time to set.
        let _ = set_time(destination, *mtime);
    }
    Ok(())
}

/// Creates the file of an entry. Returns whether [`apply_metadata`] is needed: not for hard links,
/// which share an inode, and not for headers.
fn create_entry(
    layer: &Layer<'_>,
    entry: &mut tar::Entry<'_, impl Read>,
    destination: &Path,
    sparse: Option<SparseFile>,
) -> Result<bool, Error> {
    let failed = |source: io::Error| Error::Entry { path: destination.to_owned(), source };
    let kind = entry.header().entry_type();
    let node = match kind {
        EntryType::Directory => {
            match fs::symlink_metadata(destination) {
                Ok(found) if found.is_dir() => {}
                Ok(_) => layer.replace_with_directory(destination).map_err(failed)?,
                Err(_) => fs::create_dir(destination).map_err(failed)?,
            }
            return Ok(true);
        }
        EntryType::XGlobalHeader | EntryType::XHeader | EntryType::GNULongName | EntryType::GNULongLink => {
            return Ok(false);
        }
        EntryType::Link => {
            let target = link_target(entry)?;
            let source = layer.find_existing(&target)?;
            if source != destination {
                remove_existing(destination).map_err(failed)?;
                // The target is in a lower layer, which is read-only and shared, so it is copied as
                // overlayfs would.
                if source.starts_with(layer.root) {
                    fs::hard_link(&source, destination).map_err(failed)?;
                } else {
                    copy_file(&source, destination).map_err(failed)?;
                }
            }
            return Ok(false);
        }
        EntryType::Symlink => {
            let target = link_target(entry)?;
            remove_existing(destination).map_err(failed)?;
            std::os::unix::fs::symlink(target, destination).map_err(failed)?;
            return Ok(true);
        }
        EntryType::Char => FileType::CharacterDevice,
        EntryType::Block => FileType::BlockDevice,
        EntryType::Fifo => FileType::Fifo,
        // POSIX requires that unknown entry types are treated as regular files.
        _ => {
            remove_existing(destination).map_err(failed)?;
            let mut file = File::create_new(destination).map_err(failed)?;
            match sparse {
                Some(sparse) => sparse.write(entry, &mut file).map_err(failed)?,
                None => drop(io::copy(entry, &mut file).map_err(failed)?),
            }
            return Ok(true);
        }
    };
    remove_existing(destination).map_err(failed)?;
    let header = entry.header();
    let number = |value: io::Result<Option<u32>>| value.ok().flatten().unwrap_or_default();
    let device = rustix::fs::makedev(number(header.device_major()), number(header.device_minor()));
    rustix::fs::mknodat(CWD, destination, node, Mode::from_raw_mode(0o600), device)
        .map_err(|error| failed(error.into()))?;
    Ok(true)
}

fn link_target(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<PathBuf> {
    match pax_path(entry, "linkpath")? {
        Some(path) => Ok(path),
        None => Ok(entry.link_name()?.unwrap_or_default().into_owned()),
    }
}

/// A path from the PAX header that the tar crate cannot read, because it contains a newline. See
/// [`pax`].
fn pax_path(entry: &mut tar::Entry<'_, impl Read>, name: &str) -> io::Result<Option<PathBuf>> {
    let records = pax::records(entry)?.into_iter();
    let mut found = records.filter(|(key, value)| key == name && value.contains(&b'\n'));
    Ok(found.next().map(|(_, value)| OsString::from_vec(value).into()))
}

/// Sets owner, mode and extended attributes. The order matters: chown clears the setuid bit and
/// file capabilities.
fn apply_metadata(entry: &mut tar::Entry<'_, impl Read>, destination: &Path) -> io::Result<()> {
    let header = entry.header();
    let id = |value: io::Result<u64>| u32::try_from(value.unwrap_or_default()).unwrap_or_default();
    let (uid, gid) = (Uid::from_raw(id(header.uid())), Gid::from_raw(id(header.gid())));
    rustix::fs::chownat(CWD, destination, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    let is_link = header.entry_type() == EntryType::Symlink;
    let mode = header.mode().unwrap_or(0o755);
    if !is_link {
        fs::set_permissions(destination, fs::Permissions::from_mode(mode & 0o7777))?;
    }
    for (key, value) in pax::records(entry)? {
        if let Some(name) = key.strip_prefix("SCHILY.xattr.") {
            set_xattr(destination, name, &value)?;
        }
    }
    Ok(())
}

fn set_xattr(destination: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    // A layer must not control overlayfs, for example by a redirect to another directory.
    if name.starts_with("trusted.overlay.") {
        return Ok(());
    }
    match rustix::fs::lsetxattr(destination, name, value, XattrFlags::empty()) {
        // An attribute of another security module, or a file system without xattrs. File
        // capabilities are required, so their errors are reported.
        Err(rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM)
            if !name.starts_with("security.capability") =>
        {
            Ok(())
        }
        other => Ok(other?),
    }
}

/// Copies the extended attributes of a file.
fn copy_xattrs(from: &Path, to: &Path) -> io::Result<()> {
    let mut names = match rustix::fs::llistxattr_query(from) {
        Err(rustix::io::Errno::NOTSUP) => return Ok(()),
        length => vec![0; length?],
    };
    if names.is_empty() {
        return Ok(());
    }
    let length = rustix::fs::llistxattr(from, &mut names[..])?;
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let Ok(name) = std::str::from_utf8(name) else { continue };
        let mut value = vec![0; rustix::fs::lgetxattr_query(from, name)?];
        if !value.is_empty() {
            rustix::fs::lgetxattr(from, name, &mut value[..])?;
        }
        set_xattr(to, name, &value)?;
    }
    Ok(())
}

fn set_time(destination: &Path, seconds: u64) -> io::Result<()> {
    let time = Timespec { tv_sec: i64::try_from(seconds).unwrap_or_default(), tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(CWD, destination, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Removes what is at a path, so that an entry can be created there.
fn remove_existing(destination: &Path) -> io::Result<()> {
    match fs::symlink_metadata(destination) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(destination),
        Ok(_) => fs::remove_file(destination),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn copy_file(source: &Path, destination: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(source)?;
    if !found.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "hard link target in a lower layer is not a regular file",
        ));
    }
    fs::copy(source, destination)?;
    std::os::unix::fs::chown(destination, Some(found.uid()), Some(found.gid()))?;
    fs::set_permissions(destination, found.permissions())?;
    // After chown, which clears file capabilities.
    copy_xattrs(source, destination)?;
    set_time(destination, u64::try_from(found.mtime()).unwrap_or_default())
}

fn set_opaque(directory: &Path) -> io::Result<()> {
    Ok(rustix::fs::lsetxattr(directory, c"trusted.overlay.opaque", b"y", XattrFlags::empty())?)
}

/// Gives a directory without an entry of its own the metadata of the same directory in the layers
/// below, because overlayfs shows the metadata of the upper directory.
fn copy_directory_metadata(found: Option<PathBuf>, directory: &Path) -> io::Result<()> {
    let found = found.and_then(|path| Some((fs::symlink_metadata(&path).ok()?, path)));
    match found.filter(|(found, _)| found.is_dir()) {
        Some((found, path)) => {
            std::os::unix::fs::chown(directory, Some(found.uid()), Some(found.gid()))?;
            fs::set_permissions(directory, found.permissions())?;
            copy_xattrs(&path, directory)
        }
        None => fs::set_permissions(directory, fs::Permissions::from_mode(0o755)),
    }
}

/// A layer that is being unpacked, and the layers below.
struct Layer<'a> {
    root: &'a Path,
    /// This layer and the layers below, nearest first.
    all: Vec<PathBuf>,
}

impl Layer<'_> {
    /// The path of an entry in the host file system. Creates missing parent directories. `None` for
    /// the root itself.
    fn resolve_destination(&self, named: &Path) -> Result<Option<PathBuf>, Error> {
        let parts = path_components(named)?;
        let Some((name, directories)) = parts.split_last() else { return Ok(None) };
        let parent = self.resolve_directory(named, directories.to_vec())?;
        Ok(Some(self.root.join(parent).join(name)))
    }

    /// Resolves symlinks and creates missing directories. Returns the resolved path relative to the
    /// root.
    fn resolve_directory(&self, named: &Path, mut todo: Vec<PathBuf>) -> Result<PathBuf, Error> {
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
                // A file where an entry needs a directory is replaced.
                Ok(_) => {
                    self.replace_with_directory(&here)?;
                    None
                }
                Err(_) => match find_in_layers(&self.all, &next) {
                    Some(below) if below.is_symlink() => Some(fs::read_link(below)?),
                    found => {
                        fs::create_dir(&here)?;
                        copy_directory_metadata(found, &here)?;
                        None
                    }
                },
            };
            let Some(target) = link else {
                done = next;
                continue;
            };
            links += 1;
            if links > MAX_SYMLINKS {
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

    /// Finds a file in this layer or in the layers below. Used for the targets of hard links.
    fn find_existing(&self, named: &Path) -> Result<PathBuf, Error> {
        let destination =
            self.resolve_destination(named)?.ok_or_else(|| Error::Outside { path: named.to_owned() })?;
        let relative = destination.strip_prefix(self.root).unwrap_or(&destination);
        let missing = || Error::Entry { path: named.to_owned(), source: io::ErrorKind::NotFound.into() };
        find_in_layers(&self.all, relative).ok_or_else(missing)
    }

    fn find_below(&self, relative: &Path) -> Option<PathBuf> {
        find_in_layers(&self.all[1..], relative)
    }

    /// Hides a path of the layers below. An entry of this layer at the same path stays, whichever
    /// comes first in the archive.
    fn whiteout(&self, destination: &Path) -> io::Result<()> {
        match fs::symlink_metadata(destination) {
            Ok(found) if found.is_dir() => self.set_opaque_if_below(destination),
            Ok(_) => Ok(()),
            Err(_) => Ok(rustix::fs::mknodat(CWD, destination, FileType::CharacterDevice, Mode::empty(), 0)?),
        }
    }

    /// Marks a directory opaque if the layers below have anything at its path.
    fn set_opaque_if_below(&self, destination: &Path) -> io::Result<()> {
        let relative = destination.strip_prefix(self.root).unwrap_or(destination);
        if self.find_below(relative).is_some() { set_opaque(destination) } else { Ok(()) }
    }

    /// The replaced file has hidden the layers below at this path, so the directory must hide their
    /// content, too.
    fn replace_with_directory(&self, destination: &Path) -> io::Result<()> {
        remove_existing(destination)?;
        fs::create_dir(destination)?;
        self.set_opaque_if_below(destination)
    }
}

/// Finds a path in a stack of layers, nearest first, and respects whiteouts and opaque directories.
/// Never follows symlinks: an absolute one would lead to files of the host.
fn find_in_layers(layers: &[PathBuf], relative: &Path) -> Option<PathBuf> {
    for layer in layers {
        let mut path = layer.clone();
        let mut parts = relative.components().peekable();
        let mut is_opaque = false;
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
            is_opaque |= opaque.is_ok();
        }
        if is_opaque {
            return None;
        }
    }
    None
}

/// Splits a path into components. `..` is rejected.
fn path_components(named: &Path) -> Result<Vec<PathBuf>, Error> {
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
