// BLAKE3 of bytes that are fed piece by piece.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tapetune {

class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void add(std::span<const std::byte> bytes);
  void add(std::string_view text);
  std::string hex() const;  // 64 digits

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tapetune
