use std::sync::OnceLock;

/// BLAKE3 over what is fed piece by piece, on all cores.
pub struct Hasher(blake3::Hasher);

pub fn new_hasher() -> Box<Hasher> {
    Box::new(Hasher(blake3::Hasher::new()))
}

/// None where the system starts no more threads (limits of containers, ulimit -u); rayon's own pool would panic there.
fn threads() -> Option<&'static rayon::ThreadPool> {
    static POOL: OnceLock<Option<rayon::ThreadPool>> = OnceLock::new();
    POOL.get_or_init(|| rayon::ThreadPoolBuilder::new().build().ok()).as_ref()
}

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        match threads() {
            Some(pool) => pool.install(|| self.0.update_rayon(bytes)),
            None => self.0.update(bytes),
        };
    }

    pub fn hex(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}
