/// BLAKE3 over what is fed piece by piece, on all cores.
pub struct Hasher(blake3::Hasher);

pub fn new_hasher() -> Box<Hasher> {
    Box::new(Hasher(blake3::Hasher::new()))
}

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update_rayon(bytes);
    }

    pub fn hex(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}
