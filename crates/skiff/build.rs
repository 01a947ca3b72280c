//! Links the program to a fixed place. Each pod is held by a process of this program (`skiff supervise`); wherever the
//! loader may put it, it has to correct a megabyte of addresses first, which then is that process' own.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("OS") == "linux" && target("ENV") == "gnu" {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
    // Functions that came out the same for several types are kept once, where the linker of the toolchain can do that.
    if target("ARCH") == "x86_64" && std::env::var("PROFILE").as_deref() == Ok("release") {
        println!("cargo:rustc-link-arg-bins=-Wl,--icf=all");
    }
}
