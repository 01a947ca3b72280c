//! Torn tails are truncated, corruption is rejected.

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::log::mvcc::MvccStore;
use crate::log::record::{self, Record, RecordKind};

const SECTOR_BYTES: usize = 512;

/// A segment of batches that were each synced, except for the last one.
struct TestSegment {
    bytes: Vec<u8>,
    /// The end offset of each record.
    ends: Vec<usize>,
    /// The end of the synced part.
    synced: usize,
    /// The number of records in the synced part.
    synced_records: usize,
}

fn write_segment(batch_lengths: &[Vec<usize>]) -> TestSegment {
    let dir = temp_dir();
    let faults: FaultHook = Arc::new(|_| Ok(()));
    let mut segment = Segment::create(dir.path(), FileHeader::new(1, 1, 0, 0), &faults).unwrap();
    let (mut ends, mut revision, mut synced, mut synced_records) = (Vec::new(), 1, segment.position, 0);
    for batch in batch_lengths {
        segment.sync().unwrap();
        (synced, synced_records) = (segment.position, ends.len());
        let values: Vec<_> = batch.iter().map(|len| vec![b'v'; *len]).collect();
        segment
            .append(values.iter().map(|value| {
                revision += 1;
                Record {
                    kind: RecordKind::Put,
                    synced: 0,
                    revision,
                    expires: 0,
                    key: KEYS[revision as usize % 3],
                    value,
                }
            }))
            .unwrap();
        let bytes = fs::read(files_with_extension(dir.path(), "log").pop().unwrap()).unwrap();
        ends.extend((ends.len() + 1..=ends.len() + batch.len()).map(|n| find_end(&bytes, n)));
    }
    let mut bytes = fs::read(files_with_extension(dir.path(), "log").pop().unwrap()).unwrap();
    // A part of the preallocated zeros is sufficient.
    bytes.truncate(ends.last().unwrap() + 2 * SECTOR_BYTES);
    TestSegment { bytes, ends, synced: synced as usize, synced_records }
}

const KEYS: [&str; 3] = ["/a", "/b", "/c"];

fn recover_bytes(bytes: &[u8]) -> Result<MvccStore, OpenError> {
    let dir = temp_dir();
    fs::write(dir.path().join("0000000000000001.log"), bytes).unwrap();
    let recovery = recover::recover(dir.path(), |_| {})?;
    // A second recovery gives the same result: the truncation is durable.
    let second = recover::recover(dir.path(), |_| {}).unwrap();
    assert_eq!(second.mvcc.revision(), recovery.mvcc.revision());
    Ok(recovery.mvcc)
}

/// The number of recovered records. The history must have no gaps.
#[track_caller]
fn count_records(memory: &MvccStore) -> usize {
    let count = memory.history_len();
    assert_eq!(memory.revision(), 1 + count as u64);
    count
}

#[track_caller]
fn assert_corrupt(result: Result<MvccStore, OpenError>, at: usize) {
    match result {
        Err(OpenError::Corrupt { path, offset, .. }) => {
            assert_eq!(offset as usize, at);
            assert!(path.ends_with("0000000000000001.log"));
        }
        Err(other) => panic!("{other}"),
        Ok(memory) => panic!("accepted as {} records", memory.history_len()),
    }
}

impl TestSegment {
    /// The start of the record that contains this byte.
    fn record_start(&self, at: usize) -> usize {
        self.ends.iter().rev().find(|end| **end <= at).copied().unwrap_or(segment::HEADER_BYTES)
    }

    fn records_before(&self, at: usize) -> usize {
        self.ends.iter().filter(|end| **end <= at).count()
    }

    fn end(&self) -> usize {
        *self.ends.last().unwrap()
    }
}

fn batch_lengths() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let len = prop_oneof![0..40usize, 0..3000usize];
    prop::collection::vec(prop::collection::vec(len, 1..5), 2..6)
}

/// The length field of the record that proves the corruption may start with a zero byte.
#[test]
fn detects_zero_bytes_before_record_of_any_length() {
    for len in 2000..2300 {
        let mut segment = write_segment(&[vec![0], vec![len]]);
        segment.bytes[segment::HEADER_BYTES..][..record::RECORD_HEADER_BYTES].fill(0);
        assert_corrupt(recover_bytes(&segment.bytes), segment::HEADER_BYTES);
    }
}

#[test]
fn truncated_log_keeps_complete_records() {
    let segment = write_segment(&[vec![5], vec![30, 0, 700], vec![3, 9]]);
    for at in segment.ends[0]..=segment.end() + 20 {
        let expected = segment.records_before(at);
        assert_eq!(
            count_records(&recover_bytes(&segment.bytes[..at]).unwrap()),
            expected,
            "truncated at {at}"
        );
        let mut with_zeros = segment.bytes.clone();
        with_zeros[at..].fill(0);
        assert_eq!(count_records(&recover_bytes(&with_zeros).unwrap()), expected, "zeros from {at}");
    }
}

#[test]
fn rejects_every_single_bit_change() {
    let segment = write_segment(&[vec![5], vec![30, 0], vec![600]]);
    for bit in 0..segment.end() * 8 {
        let mut bytes = segment.bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let at = if bit / 8 < segment::HEADER_BYTES { 0 } else { segment.record_start(bit / 8) };
        assert_corrupt(recover_bytes(&bytes), at);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// The machine stops while the last batch is written: any of its sectors may be missing.
    #[test]
    fn missing_sectors_of_last_batch_keep_synced_records(
        batch_lengths in batch_lengths(), missing: Vec<bool>, cut: Index,
    ) {
        let mut segment = write_segment(&batch_lengths);
        let first = segment.synced / SECTOR_BYTES;
        for (n, missing) in missing.iter().enumerate() {
            let sector = (first + n) * SECTOR_BYTES;
            if *missing && sector < segment.end() {
                segment.bytes[sector.max(segment.synced)..sector + SECTOR_BYTES].fill(0);
            }
        }
        let count = count_records(&recover_bytes(&segment.bytes).unwrap());
        prop_assert!(count >= segment.synced_records);
        let at = segment.synced + cut.index(segment.end() - segment.synced + 1);
        prop_assert!(count_records(&recover_bytes(&segment.bytes[..at]).unwrap()) >= segment.synced_records);
    }

    /// Zeros in synced data, followed by a record that proves the sync.
    #[test]
    fn rejects_zeros_in_synced_data(batch_lengths in batch_lengths(), from: Index, len in 1..2000usize) {
        let mut segment = write_segment(&batch_lengths);
        let from = segment::HEADER_BYTES + from.index(segment.synced - segment::HEADER_BYTES);
        let until = (from + len).min(segment.synced);
        let zeros = segment.bytes[from..until].iter().position(|byte| *byte != 0);
        prop_assume!(zeros.is_some());
        let changed = from + zeros.unwrap();
        segment.bytes[from..until].fill(0);
        assert_corrupt(recover_bytes(&segment.bytes), segment.record_start(changed));
    }

    #[test]
    fn rejects_random_bit_change(batch_lengths in batch_lengths(), at: Index, bit in 0..8u8) {
        let mut segment = write_segment(&batch_lengths);
        let at = segment::HEADER_BYTES + at.index(segment.end() - segment::HEADER_BYTES);
        segment.bytes[at] ^= 1 << bit;
        assert_corrupt(recover_bytes(&segment.bytes), segment.record_start(at));
    }

    /// Recovery of arbitrary data does not panic.
    #[test]
    fn recovery_does_not_panic_on_random_bytes(batch_lengths in batch_lengths(), changes: Vec<(Index, u8)>, until: Index) {
        let mut segment = write_segment(&batch_lengths);
        for (at, byte) in changes {
            let at = at.index(segment.end());
            segment.bytes[at] = byte;
        }
        let _ = recover_bytes(&segment.bytes[..until.index(segment.bytes.len())]);
    }
}

#[tokio::test]
async fn rejects_truncated_missing_and_replaced_segments() {
    let dir = temp_dir();
    for n in 0..3 {
        let store = open_store(dir.path());
        create(&store, &format!("/{n}"), "some value").await;
    }
    let logs = files_with_extension(dir.path(), "log");
    assert_eq!(logs.len(), 3);
    let reopen = |change: &dyn Fn(&Path)| {
        let dir_copy = copy_dir(dir.path());
        change(dir_copy.path());
        LogStore::open(dir_copy.path(), Config::default()).map(drop).err()
    };
    assert!(reopen(&|_| {}).is_none());
    let name = |n: usize| logs[n].file_name().unwrap();
    // The previous segment must end exactly at the position in the next header.
    for cut in 1..60 {
        let error = reopen(&|dir| {
            let file = fs::OpenOptions::new().write(true).open(dir.join(name(1))).unwrap();
            file.set_len(file.metadata().unwrap().len() - cut).unwrap();
        });
        assert!(matches!(&error, Some(OpenError::Corrupt { path, .. }) if path.ends_with(name(1))));
    }
    for missing in 0..2 {
        let error = reopen(&|dir| fs::remove_file(dir.join(name(missing))).unwrap());
        assert!(matches!(&error, Some(OpenError::Missing { path }) if path.ends_with(name(missing))));
    }
    let error = reopen(&|dir| {
        fs::copy(dir.join(name(0)), dir.join(name(1))).unwrap();
    });
    assert!(matches!(&error, Some(OpenError::Corrupt { offset: 0, .. })));
    let error = reopen(&|dir| {
        let file = dir.join(name(2));
        let mut bytes = fs::read(&file).unwrap();
        bytes[8] = 2;
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        fs::write(file, bytes).unwrap();
    });
    assert!(error.unwrap().to_string().contains("format version 2 is not supported, only 1"));
    // A temporary file of an interrupted start.
    assert!(reopen(&|dir| fs::write(dir.join("00000000000000ff.log.tmp"), "x").unwrap()).is_none());
}
