//! eBPF, as far as the device rules of cgroup v2 need it: a few instructions, and loading a program.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

/// One of the eleven registers of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(pub u8);

/// An eBPF instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// The opcode.
    pub code: u8,
    /// The destination register in the lower half, the source register in the upper half.
    pub regs: u8,
    /// A jump distance or a memory offset.
    pub offset: i16,
    /// The immediate operand.
    pub value: i32,
}

impl Instruction {
    /// Ends the program. The result is in register 0.
    pub const EXIT: Instruction = Instruction { code: 0x95, regs: 0, offset: 0, value: 0 };

    fn with_value(code: u8, target: Register, value: i32) -> Instruction {
        Instruction { code, regs: target.0, offset: 0, value }
    }

    fn with_source(code: u8, target: Register, source: Register, offset: i16) -> Instruction {
        Instruction { code, regs: target.0 | source.0 << 4, offset, value: 0 }
    }

    /// Loads 32 bits from `offset` in the memory that `source` points to.
    pub fn load(target: Register, source: Register, offset: i16) -> Instruction {
        Instruction::with_source(0x61, target, source, offset)
    }

    /// Copies a register. This and the operations below are on 32 bits.
    pub fn copy(target: Register, source: Register) -> Instruction {
        Instruction::with_source(0xbc, target, source, 0)
    }

    pub fn set(target: Register, value: i32) -> Instruction {
        Instruction::with_value(0xb4, target, value)
    }

    pub fn and(target: Register, value: i32) -> Instruction {
        Instruction::with_value(0x54, target, value)
    }

    pub fn shift_right(target: Register, bits: i32) -> Instruction {
        Instruction::with_value(0x74, target, bits)
    }

    /// Skips `count` instructions if the register does not have this value.
    pub fn jump_if_not_equal(register: Register, value: i32, count: i16) -> Instruction {
        Instruction { offset: count, ..Instruction::with_value(0x56, register, value) }
    }
}

const PROG_LOAD: libc::c_long = 5;
const PROG_ATTACH: libc::c_long = 8;
const PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const ATTACH_TYPE_CGROUP_DEVICE: u32 = 6;
/// Attached in addition to other programs, all of which must allow an access.
const ALLOW_MULTI: u32 = 2;

/// The first fields of the kernel's `bpf_attr`; those left out count as zero.
#[repr(C)]
struct ProgLoadAttr {
    kind: u32,
    count: u32,
    program_ptr: u64,
    license_ptr: u64,
}

#[repr(C)]
struct ProgAttachAttr {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Attaches a device program to a cgroup (v2), for as long as the cgroup exists.
pub(crate) fn limit_devices(group: &Path, program: &[Instruction]) -> io::Result<()> {
    let group = File::open(group)?;
    let count = u32::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let load = ProgLoadAttr {
        kind: PROG_TYPE_CGROUP_DEVICE,
        count,
        program_ptr: program.as_ptr() as u64,
        license_ptr: c"GPL".as_ptr() as u64,
    };
    // SAFETY: the struct is the beginning of the kernel's for this command, and its size is passed. The
    // program and the license outlive the call, and `count` is the program's length. The kernel
    // verifies the program.
    let prog_fd =
        unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const load, size_of::<ProgLoadAttr>()) };
    let prog_fd = i32::try_from(prog_fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just created this descriptor, so it has no other owner.
    let program = unsafe { OwnedFd::from_raw_fd(prog_fd) };
    let attach = ProgAttachAttr {
        target: group.as_raw_fd().unsigned_abs(),
        program: program.as_raw_fd().unsigned_abs(),
        kind: ATTACH_TYPE_CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the struct is the beginning of the kernel's for this command, and its size is passed.
    // Both descriptors are open.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, PROG_ATTACH, &raw const attach, size_of::<ProgAttachAttr>()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
