//! Torn tails are cut off, damage is refused: what the log looks like after every kind of accident.

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::log::memory::Memory;
use crate::log::record::{self, Kind, Record};

const SECTOR: usize = 512;

/// A segment of batches that were each synced, but for the last.
struct Written {
    bytes: Vec<u8>,
    /// Where each record ends.
    ends: Vec<usize>,
    /// Up to here all was synced, ...
    synced: usize,
    /// ... which are this many records.
    sure: usize,
}

fn write(batches: &[Vec<usize>]) -> Written {
    let dir = directory();
    let faults: Faults = Arc::new(|_| Ok(()));
    let mut segment = Segment::create(dir.path(), Header::new(1, 1, 0, 0), &faults).unwrap();
    let (mut ends, mut revision, mut synced, mut sure) = (Vec::new(), 1, segment.position, 0);
    for batch in batches {
        segment.sync().unwrap();
        (synced, sure) = (segment.position, ends.len());
        let values: Vec<_> = batch.iter().map(|len| vec![b'v'; *len]).collect();
        segment
            .append(values.iter().map(|value| {
                revision += 1;
                Record {
                    kind: Kind::Put,
                    synced: 0,
                    revision,
                    expires: 0,
                    key: KEYS[revision as usize % 3],
                    value,
                }
            }))
            .unwrap();
        let bytes = fs::read(files(dir.path(), "log").pop().unwrap()).unwrap();
        ends.extend((ends.len() + 1..=ends.len() + batch.len()).map(|n| find_end(&bytes, n)));
    }
    let mut bytes = fs::read(files(dir.path(), "log").pop().unwrap()).unwrap();
    // Some of the zeros ahead are as good as all.
    bytes.truncate(ends.last().unwrap() + 2 * SECTOR);
    Written { bytes, ends, synced: synced as usize, sure }
}

const KEYS: [&str; 3] = ["/a", "/b", "/c"];

fn read(bytes: &[u8]) -> Result<Memory, OpenError> {
    let dir = directory();
    fs::write(dir.path().join("0000000000000001.log"), bytes).unwrap();
    let recovered = recover::recover(dir.path(), |_| {})?;
    // Whatever was cut off is gone for good.
    let again = recover::recover(dir.path(), |_| {}).unwrap();
    assert_eq!(again.memory.revision(), recovered.memory.revision());
    Ok(recovered.memory)
}

/// How many records came back; each is checked by the history being without gaps.
#[track_caller]
fn records(memory: &Memory) -> usize {
    let count = memory.history_len();
    assert_eq!(memory.revision(), 1 + count as u64);
    count
}

#[track_caller]
fn check_refused(result: Result<Memory, OpenError>, at: usize) {
    match result {
        Err(OpenError::Damaged { path, offset, .. }) => {
            assert_eq!(offset as usize, at);
            assert!(path.ends_with("0000000000000001.log"));
        }
        Err(other) => panic!("{other}"),
        Ok(memory) => panic!("taken as {} records", memory.history_len()),
    }
}

impl Written {
    /// Where the record that holds this byte begins.
    fn start_of(&self, at: usize) -> usize {
        self.ends.iter().rev().find(|end| **end <= at).copied().unwrap_or(segment::HEADER)
    }

    fn whole_before(&self, at: usize) -> usize {
        self.ends.iter().filter(|end| **end <= at).count()
    }

    fn end(&self) -> usize {
        *self.ends.last().unwrap()
    }
}

fn batches() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let len = prop_oneof![0..40usize, 0..3000usize];
    prop::collection::vec(prop::collection::vec(len, 1..5), 2..6)
}

/// The length of the record that tells of it begins with a zero.
#[test]
fn a_hole_is_told_of_by_a_record_of_any_length() {
    for len in 2000..2300 {
        let mut written = write(&[vec![0], vec![len]]);
        written.bytes[segment::HEADER..][..record::HEAD].fill(0);
        check_refused(read(&written.bytes), segment::HEADER);
    }
}

#[test]
fn cut_at_every_byte_of_the_last_records() {
    let written = write(&[vec![5], vec![30, 0, 700], vec![3, 9]]);
    for at in written.ends[0]..=written.end() + 20 {
        let expected = written.whole_before(at);
        assert_eq!(records(&read(&written.bytes[..at]).unwrap()), expected, "truncated at {at}");
        let mut zeroed = written.bytes.clone();
        zeroed[at..].fill(0);
        assert_eq!(records(&read(&zeroed).unwrap()), expected, "zeros from {at}");
    }
}

#[test]
fn every_flipped_bit_is_refused() {
    let written = write(&[vec![5], vec![30, 0], vec![600]]);
    for bit in 0..written.end() * 8 {
        let mut bytes = written.bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let at = if bit / 8 < segment::HEADER { 0 } else { written.start_of(bit / 8) };
        check_refused(read(&bytes), at);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// The machine stops while the last batch is on its way: any of its sectors may be missing.
    #[test]
    fn missing_sectors_of_the_last_batch_lose_only_of_it(
        batches in batches(), missing: Vec<bool>, cut: Index,
    ) {
        let mut written = write(&batches);
        let first = written.synced / SECTOR;
        for (n, missing) in missing.iter().enumerate() {
            let sector = (first + n) * SECTOR;
            if *missing && sector < written.end() {
                written.bytes[sector.max(written.synced)..sector + SECTOR].fill(0);
            }
        }
        let count = records(&read(&written.bytes).unwrap());
        prop_assert!(count >= written.sure);
        let at = written.synced + cut.index(written.end() - written.synced + 1);
        prop_assert!(records(&read(&written.bytes[..at]).unwrap()) >= written.sure);
    }

    /// A hole where data had been synced, and a record after it that knows.
    #[test]
    fn holes_in_the_middle_are_refused(batches in batches(), from: Index, len in 1..2000usize) {
        let mut written = write(&batches);
        let from = segment::HEADER + from.index(written.synced - segment::HEADER);
        let until = (from + len).min(written.synced);
        let zeros = written.bytes[from..until].iter().position(|byte| *byte != 0);
        prop_assume!(zeros.is_some());
        let changed = from + zeros.unwrap();
        written.bytes[from..until].fill(0);
        check_refused(read(&written.bytes), written.start_of(changed));
    }

    #[test]
    fn flipped_bits_are_refused(batches in batches(), at: Index, bit in 0..8u8) {
        let mut written = write(&batches);
        let at = segment::HEADER + at.index(written.end() - segment::HEADER);
        written.bytes[at] ^= 1 << bit;
        check_refused(read(&written.bytes), written.start_of(at));
    }

    /// Whatever is in the file: an answer, no panic.
    #[test]
    fn garbage_is_survived(batches in batches(), places: Vec<(Index, u8)>, until: Index) {
        let mut written = write(&batches);
        for (at, byte) in places {
            let at = at.index(written.end());
            written.bytes[at] = byte;
        }
        let _ = read(&written.bytes[..until.index(written.bytes.len())]);
    }
}

#[tokio::test]
async fn segments_and_snapshots_are_checked_as_a_whole() {
    let dir = directory();
    for n in 0..3 {
        let store = open(dir.path());
        create(&store, &format!("/{n}"), "some value").await;
    }
    let logs = files(dir.path(), "log");
    assert_eq!(logs.len(), 3);
    let reopen = |change: &dyn Fn(&Path)| {
        let copy = copy(dir.path());
        change(copy.path());
        LogStore::open(copy.path(), Config::default()).map(drop).err()
    };
    assert!(reopen(&|_| {}).is_none());
    let name = |n: usize| logs[n].file_name().unwrap();
    // An earlier segment must reach exactly to where the next one says.
    for cut in 1..60 {
        let error = reopen(&|dir| {
            let file = fs::OpenOptions::new().write(true).open(dir.join(name(1))).unwrap();
            file.set_len(file.metadata().unwrap().len() - cut).unwrap();
        });
        assert!(matches!(&error, Some(OpenError::Damaged { path, .. }) if path.ends_with(name(1))));
    }
    for gone in 0..2 {
        let error = reopen(&|dir| fs::remove_file(dir.join(name(gone))).unwrap());
        assert!(matches!(&error, Some(OpenError::Missing { path }) if path.ends_with(name(gone))));
    }
    let error = reopen(&|dir| {
        fs::copy(dir.join(name(0)), dir.join(name(1))).unwrap();
    });
    assert!(matches!(&error, Some(OpenError::Damaged { offset: 0, .. })));
    let error = reopen(&|dir| {
        let file = dir.join(name(2));
        let mut bytes = fs::read(&file).unwrap();
        bytes[8] = 2;
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        fs::write(file, bytes).unwrap();
    });
    assert!(error.unwrap().to_string().contains("format version 2 is not known, only 1"));
    // Left over from an unfinished start.
    assert!(reopen(&|dir| fs::write(dir.join("00000000000000ff.log.tmp"), "x").unwrap()).is_none());
}
