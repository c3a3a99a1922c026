#include "hf/hash.h"

#include "hf_bridge.h"
#include "rust/cxx.h"

namespace tapetune {

struct Hasher::Impl {
  rust::Box<hf::bridge::Hasher> hasher = hf::bridge::new_hasher();
};

Hasher::Hasher() : impl_(std::make_unique<Impl>()) {}
Hasher::~Hasher() = default;

void Hasher::add(std::span<const std::byte> bytes) {
  impl_->hasher->update({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
}

void Hasher::add(std::string_view text) { add(std::as_bytes(std::span(text.data(), text.size()))); }

std::string Hasher::hex() const { return std::string(impl_->hasher->hex()); }

}  // namespace tapetune
