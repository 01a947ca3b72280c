//! Filters of system calls: the kernel's own little programs, loaded for this process and all it becomes.

use std::io;

/// One instruction of a classic BPF program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SockFilter {
    /// What to do.
    pub code: u16,
    /// How many instructions to skip where a comparison holds.
    pub jump_true: u8,
    /// How many where it does not.
    pub jump_false: u8,
    /// The number it works with.
    pub value: u32,
}

/// Loads a filter for this thread; there is no way back. Needs `no_new_privs` or CAP_SYS_ADMIN.
pub fn load(program: &[SockFilter]) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The structure has a pointer to mutable memory but the kernel only reads it.
    let filter = program.as_ptr().cast::<libc::sock_filter>().cast_mut();
    let program = libc::sock_fprog { len: length, filter };
    // SAFETY: `Instruction` has the layout of `sock_filter`; the program and the structure that names it outlive the
    // call, and the length is that of the program. The kernel refuses one that is not well formed.
    let done =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
