//! The architectures whose programs run on this host: the native one and its compat ABIs.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::compat_syscalls;
use super::table;

/// `__X32_SYSCALL_BIT`, set in the syscall numbers of x32 programs.
pub const X32_SYSCALL_BIT: u32 = 0x4000_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// The native architecture.
    Own,
    /// i386 programs on x86_64.
    #[cfg(target_arch = "x86_64")]
    X86,
    /// The x32 ABI: x86_64 with 32-bit pointers.
    #[cfg(target_arch = "x86_64")]
    X32,
    /// 32-bit ARM programs on aarch64.
    #[cfg(target_arch = "aarch64")]
    Arm,
}

#[cfg(target_arch = "x86_64")]
mod here {
    pub const OWN: &str = "SCMP_ARCH_X86_64";
    pub const GO: &str = "amd64";
    pub const TOKEN: u32 = 0xc000_003e;
}
#[cfg(target_arch = "aarch64")]
mod here {
    pub const OWN: &str = "SCMP_ARCH_AARCH64";
    pub const GO: &str = "arm64";
    pub const TOKEN: u32 = 0xc000_00b7;
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the kernel's number of this architecture is not known");

/// The native architecture as Go names it (GOARCH), which docker profiles use in `includes` and
/// `excludes`.
pub use here::GO;

/// Valid names in profiles. Those whose programs do not run here are ignored.
const OTHER_ARCH_NAMES: [&str; 20] = [
    "SCMP_ARCH_X86",
    "SCMP_ARCH_X86_64",
    "SCMP_ARCH_X32",
    "SCMP_ARCH_ARM",
    "SCMP_ARCH_AARCH64",
    "SCMP_ARCH_MIPS",
    "SCMP_ARCH_MIPS64",
    "SCMP_ARCH_MIPS64N32",
    "SCMP_ARCH_MIPSEL",
    "SCMP_ARCH_MIPSEL64",
    "SCMP_ARCH_MIPSEL64N32",
    "SCMP_ARCH_PPC",
    "SCMP_ARCH_PPC64",
    "SCMP_ARCH_PPC64LE",
    "SCMP_ARCH_S390",
    "SCMP_ARCH_S390X",
    "SCMP_ARCH_RISCV64",
    "SCMP_ARCH_LOONGARCH64",
    "SCMP_ARCH_M68K",
    "SCMP_ARCH_SH",
];

impl Arch {
    /// The names in profiles and their architectures, the native one first.
    pub const ALL: &[(&str, Arch)] = &[
        (here::OWN, Arch::Own),
        #[cfg(target_arch = "x86_64")]
        ("SCMP_ARCH_X86", Arch::X86),
        #[cfg(target_arch = "x86_64")]
        ("SCMP_ARCH_X32", Arch::X32),
        #[cfg(target_arch = "aarch64")]
        ("SCMP_ARCH_ARM", Arch::Arm),
    ];

    /// Parses a name in a profile; `None` if its programs do not run on this host.
    pub fn from_name(name: &str) -> Result<Option<Arch>, String> {
        match Arch::ALL.iter().find(|(known, _)| *known == name) {
            Some((_, machine)) => Ok(Some(*machine)),
            None if OTHER_ARCH_NAMES.contains(&name) => Ok(None),
            None => Err(format!("string {name} is not a valid arch for seccomp")),
        }
    }

    /// Whether `name` is the native architecture.
    pub fn is_native_name(name: &str) -> bool {
        name == here::OWN
    }

    /// The kernel's `AUDIT_ARCH_*` value, as in `seccomp_data.arch`.
    pub fn audit_arch(self) -> u32 {
        match self {
            Arch::Own => here::TOKEN,
            #[cfg(target_arch = "x86_64")]
            Arch::X86 => 0x4000_0003,
            #[cfg(target_arch = "x86_64")]
            Arch::X32 => here::TOKEN,
            #[cfg(target_arch = "aarch64")]
            Arch::Arm => 0x4000_0028,
        }
    }

    /// The number of a syscall, if the architecture has it.
    pub fn syscall_number(self, name: &str) -> Option<u32> {
        match self {
            Arch::Own => table::number(name),
            #[cfg(target_arch = "x86_64")]
            Arch::X86 => compat_syscalls::find(compat_syscalls::X86, name),
            #[cfg(target_arch = "x86_64")]
            Arch::X32 => {
                let number =
                    compat_syscalls::find(compat_syscalls::X32, name).or_else(|| table::number(name))?;
                Some(number | X32_SYSCALL_BIT)
            }
            #[cfg(target_arch = "aarch64")]
            Arch::Arm => compat_syscalls::find(compat_syscalls::ARM, name),
        }
    }

    /// Whether this is x32, which shares the native `AUDIT_ARCH_*` value and differs only in its
    /// syscall numbers.
    pub fn is_x32(self) -> bool {
        self != Arch::Own && self.audit_arch() == here::TOKEN
    }
}
