//! Linker options of the skiff binary. The binary is linked as non-PIE: each pod has its own supervisor
//! process (`skiff supervise`), and with PIE the relocations would cost each of these processes about a
//! megabyte of private memory.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("OS") == "linux" && target("ENV") == "gnu" {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
    // Folds identical functions (instances of one generic function, for example), if the toolchain's
    // linker supports it.
    if target("ARCH") == "x86_64" && std::env::var("PROFILE").as_deref() == Ok("release") {
        println!("cargo:rustc-link-arg-bins=-Wl,--icf=all");
    }
}
