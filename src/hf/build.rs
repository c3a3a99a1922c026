fn main() {
    cxx_build::bridge("src/lib.rs").std("c++20").compile("tapetune_hf_bridge");
    println!("cargo:rerun-if-changed=src/lib.rs");
}
