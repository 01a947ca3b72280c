//! Loads seccomp filters, which apply to this process and its children.

use std::io;

/// An instruction of a classic BPF program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SockFilter {
    /// The opcode.
    pub code: u16,
    /// Instructions to skip if a comparison is true.
    pub jump_true: u8,
    /// Instructions to skip if it is false.
    pub jump_false: u8,
    /// The operand.
    pub value: u32,
}

/// Loads a filter for this thread. It cannot be removed. Needs `no_new_privs` or CAP_SYS_ADMIN.
pub fn load(program: &[SockFilter]) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The struct has a pointer to mutable memory, but the kernel only reads it.
    let filter = program.as_ptr().cast::<libc::sock_filter>().cast_mut();
    let program = libc::sock_fprog { len: length, filter };
    // SAFETY: `SockFilter` has the layout of `sock_filter`. The program and the struct that refers to
    // it outlive the call, and the length is the program's. The kernel rejects an invalid program.
    let done =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
