#include "gguf/reader.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"

namespace tapetune::gguf {
namespace fs = std::filesystem;

namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read as it lies in memory");

// Bytes of one value; 0 for those that have a length of their own, and for kinds that do not exist.
std::uint64_t size_of(Kind kind) {
  switch (kind) {
    case Kind::u8:
    case Kind::i8:
    case Kind::boolean:
      return 1;
    case Kind::u16:
    case Kind::i16:
      return 2;
    case Kind::u32:
    case Kind::i32:
    case Kind::f32:
      return 4;
    case Kind::u64:
    case Kind::i64:
    case Kind::f64:
      return 8;
    case Kind::text:
    case Kind::array:
      break;
  }
  return 0;
}

template <typename T>
T load(std::span<const std::byte> bytes, std::uint64_t index = 0) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

// Walks the bytes of a file and stops with an error where they end too soon.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  std::uint64_t position() const { return position_; }
  std::uint64_t left() const { return bytes_.size() - position_; }

  std::span<const std::byte> take(std::uint64_t count, std::string_view what) {
    if (count > left()) {
      fail("gguf", "{}: ends within {}; it is truncated or damaged, download or copy it again.", where_, what);
    }
    const auto taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }

  template <typename T>
  T number(std::string_view what) {
    return load<T>(take(sizeof(T), what));
  }

  std::string text(std::string_view what) {
    const auto length = number<std::uint64_t>(what);
    const auto bytes = take(length, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  // How many of something follow; each takes at least so many bytes, so that more than fit are a lie.
  std::uint64_t count(std::uint64_t smallest, std::string_view what) {
    const auto said = number<std::uint64_t>(what);
    if (said > left() / smallest) {
      fail("gguf", "{}: says that it has {} {}, but {} bytes are left; it is truncated or damaged, copy it again.",
           where_, said, what, left());
    }
    return said;
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& where_;
  std::uint64_t position_ = 0;
};

// The bytes of `count` values; texts are walked, since each has its own length.
std::span<const std::byte> value_bytes(Cursor& cursor, Kind kind, std::uint64_t count, std::string_view key,
                                       const std::string& where) {
  if (kind != Kind::text) {
    const std::uint64_t size = size_of(kind);
    if (size == 0) {
      fail("gguf", "{}: {} has a value of kind {}, which is unknown or nested; tapetune does not read it.", where, key,
           static_cast<std::uint32_t>(kind));
    }
    if (count > cursor.left() / size) return cursor.take(std::numeric_limits<std::uint64_t>::max(), key);  // fails
    return cursor.take(count * size, key);
  }
  Cursor ahead = cursor;
  for (std::uint64_t i = 0; i < count; ++i) ahead.take(ahead.number<std::uint64_t>(key), key);
  return cursor.take(ahead.position() - cursor.position(), key);
}

Value read_value(Cursor& cursor, const std::string& key, const std::string& where) {
  Value value;
  value.kind = static_cast<Kind>(cursor.number<std::uint32_t>(key));
  value.is_array = value.kind == Kind::array;
  if (value.is_array) {
    value.kind = static_cast<Kind>(cursor.number<std::uint32_t>(key));
    value.count = cursor.count(1, "values of " + key);
  }
  value.bytes = value_bytes(cursor, value.kind, value.count, key, where);
  return value;
}

struct Extent {
  std::string name;
  std::uint64_t offset = 0;  // from the start of the data
  std::uint64_t bytes = 0;
};

// The shape and format of one tensor; where its bytes are goes into `extent`.
StoredBlocks read_tensor(Cursor& cursor, Extent& extent, const std::string& where) {
  extent.name = cursor.text("a tensor's name");
  const auto dimensions = cursor.number<std::uint32_t>(extent.name);
  if (dimensions < 1 || dimensions > 4) {
    fail("gguf", "{}: tensor {} has {} dimensions, but GGUF has 1 to 4; the file is damaged.", where, extent.name,
         dimensions);
  }
  StoredBlocks tensor;
  std::uint64_t numbers = 1;
  for (std::uint32_t i = 0; i < dimensions; ++i) {
    const auto size = cursor.number<std::uint64_t>(extent.name);
    constexpr std::uint64_t most = std::uint64_t{1} << 48;  // of numbers in a tensor: far more than any disk holds
    if (size == 0 || size > most / numbers) {
      fail("gguf", "{}: tensor {} has a dimension of {}, which cannot be; the file is damaged.", where, extent.name,
           size);
    }
    numbers *= size;
    tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(size));
  }
  const auto type = cursor.number<std::uint32_t>(extent.name);
  tensor.format = find_format(type);
  if (tensor.format == nullptr) {
    const std::string name(known_type_name(type));
    fail("gguf",
         "{}: tensor {} is stored as {}, which tapetune does not read; it reads F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K "
         "and Q6_K.",
         where, extent.name, name.empty() ? fmt::format("type {}", type) : name);
  }
  if (static_cast<std::uint64_t>(tensor.shape.back()) % tensor.format->numbers != 0) {
    fail("gguf", "{}: tensor {} has rows of {}, but {} stores blocks of {}; the file is damaged.", where, extent.name,
         tensor.shape.back(), tensor.format->name, tensor.format->numbers);
  }
  extent.bytes = numbers / tensor.format->numbers * tensor.format->bytes;
  extent.offset = cursor.number<std::uint64_t>(extent.name);
  return tensor;
}

void check_extents(std::vector<Extent> extents, std::uint64_t alignment, std::uint64_t data_bytes,
                   const std::string& where) {
  for (const Extent& extent : extents) {
    if (extent.offset % alignment != 0) {
      fail("gguf", "{}: tensor {} starts at {}, which is no multiple of {}; the file is damaged.", where, extent.name,
           extent.offset, alignment);
    }
    if (extent.offset > data_bytes || extent.bytes > data_bytes - extent.offset) {
      fail("gguf",
           "{}: tensor {} should end at byte {} of the data, but there are {}; the file is truncated, copy it "
           "again.",
           where, extent.name, extent.offset + extent.bytes, data_bytes);
    }
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i - 1].offset + extents[i - 1].bytes > extents[i].offset) {
      fail("gguf", "{}: tensors {} and {} overlap; the file is damaged.", where, extents[i - 1].name, extents[i].name);
    }
  }
}

void check_start(Cursor& cursor, const std::string& where) {
  const auto start = cursor.take(magic.size(), "its first bytes");
  if (std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
    fail("gguf",
         "{}: is not a GGUF file; give a .gguf file, or the folder of a Hugging Face checkpoint to the other "
         "commands.",
         where);
  }
  const auto version = cursor.number<std::uint32_t>("its version");
  if (version != 0 && (version & 0xffff) == 0) {
    fail("gguf", "{}: is a big-endian GGUF file; tapetune reads little-endian ones.", where);
  }
  if (version != 2 && version != 3) {
    fail("gguf", "{}: is GGUF version {}, but tapetune reads 2 and 3; convert the model again with today's llama.cpp.",
         where, version);
  }
}

}  // namespace

File File::open(const fs::path& path) {
  std::shared_ptr<const MappedFile> mapped = MappedFile::open(path);
  File file = parse(mapped->bytes(), path.string());
  file.mapped_ = std::move(mapped);
  return file;
}

File File::parse(std::span<const std::byte> bytes, std::string where) {
  File file;
  file.where_ = std::move(where);
  Cursor cursor(bytes, file.where_);
  check_start(cursor, file.where_);
  constexpr std::uint64_t smallest_tensor = 32, smallest_value = 13;  // with a name of no letters
  const std::uint64_t tensor_count = cursor.count(smallest_tensor, "tensors");
  const std::uint64_t value_count = cursor.count(smallest_value, "metadata keys");
  for (std::uint64_t i = 0; i < value_count; ++i) {
    const std::string key = cursor.text("a metadata key");
    if (!file.values_.emplace(key, read_value(cursor, key, file.where_)).second) {
      fail("gguf", "{}: has the key {} twice; the file is damaged.", file.where_, key);
    }
  }
  std::vector<Extent> extents(tensor_count);
  for (Extent& extent : extents) {
    StoredBlocks tensor = read_tensor(cursor, extent, file.where_);
    if (!file.tensors_.emplace(extent.name, std::move(tensor)).second) {
      fail("gguf", "{}: has the tensor {} twice; the file is damaged.", file.where_, extent.name);
    }
  }
  const auto alignment = static_cast<std::uint64_t>(
      file.whole("general.alignment").value_or(static_cast<std::int64_t>(default_alignment)));
  constexpr std::uint64_t widest_alignment = 1 << 20;
  if (!std::has_single_bit(alignment) || alignment > widest_alignment) {
    fail("gguf", "{}: general.alignment must be a power of two up to {}, but is {}.", file.where_, widest_alignment,
         alignment);
  }
  const std::uint64_t data_start =
      std::min<std::uint64_t>((cursor.position() + alignment - 1) / alignment * alignment, bytes.size());
  const auto data = bytes.subspan(data_start);
  check_extents(extents, alignment, data.size(), file.where_);
  for (const Extent& extent : extents) {
    file.tensors_.find(extent.name)->second.bytes = data.subspan(extent.offset, extent.bytes);
  }
  return file;
}

const StoredBlocks* File::tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const Value* File::find(std::string_view key, bool array) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return nullptr;
  if (found->second.is_array != array) wrong_kind(key, array ? "must be a list" : "must be one value, not a list");
  return &found->second;
}

void File::wrong_kind(std::string_view key, std::string_view rule) const {
  fail("gguf", "{}: {} {}; the file is damaged or of a newer kind.", where_, key, rule);
}

namespace {

std::optional<std::int64_t> as_whole(const Value& value, std::uint64_t index) {
  switch (value.kind) {
    case Kind::u8:
      return load<std::uint8_t>(value.bytes, index);
    case Kind::i8:
      return load<std::int8_t>(value.bytes, index);
    case Kind::u16:
      return load<std::uint16_t>(value.bytes, index);
    case Kind::i16:
      return load<std::int16_t>(value.bytes, index);
    case Kind::u32:
      return load<std::uint32_t>(value.bytes, index);
    case Kind::i32:
      return load<std::int32_t>(value.bytes, index);
    case Kind::i64:
      return load<std::int64_t>(value.bytes, index);
    case Kind::u64: {
      const auto wide = load<std::uint64_t>(value.bytes, index);
      if (wide <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return static_cast<std::int64_t>(wide);
      }
      return std::nullopt;
    }
    default:
      return std::nullopt;
  }
}

// 1e-05f as a double is 9.99999974737875e-06; whoever wrote it meant 1e-05.
double as_written(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double written = value;
  std::from_chars(text, end, written);
  return written;
}

std::optional<double> as_number(const Value& value, std::uint64_t index) {
  if (value.kind == Kind::f32) return as_written(load<float>(value.bytes, index));
  if (value.kind == Kind::f64) return load<double>(value.bytes, index);
  const std::optional<std::int64_t> whole = as_whole(value, index);
  return whole ? std::optional(static_cast<double>(*whole)) : std::nullopt;
}

}  // namespace

std::optional<std::string> File::text(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return std::nullopt;
  if (value->kind != Kind::text) wrong_kind(key, "must be a text");
  return Cursor(value->bytes, where_).text(key);
}

std::optional<std::int64_t> File::whole(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return std::nullopt;
  const std::optional<std::int64_t> whole = as_whole(*value, 0);
  if (!whole) wrong_kind(key, "must be a whole number");
  return whole;
}

std::optional<double> File::number(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return std::nullopt;
  const std::optional<double> number = as_number(*value, 0);
  if (!number || !std::isfinite(*number)) wrong_kind(key, "must be a finite number");
  return number;
}

std::optional<bool> File::flag(std::string_view key) const {
  const Value* value = find(key, false);
  if (value == nullptr) return std::nullopt;
  if (value->kind != Kind::boolean) wrong_kind(key, "must be true or false");
  return load<std::uint8_t>(value->bytes) != 0;
}

std::vector<std::string> File::texts(std::string_view key) const {
  const Value* value = find(key, true);
  std::vector<std::string> list;
  if (value == nullptr) return list;
  if (value->kind != Kind::text) wrong_kind(key, "must be a list of texts");
  Cursor cursor(value->bytes, where_);
  list.reserve(value->count);
  for (std::uint64_t i = 0; i < value->count; ++i) list.push_back(cursor.text(key));
  return list;
}

std::vector<double> File::numbers(std::string_view key) const {
  const Value* value = find(key, true);
  std::vector<double> list;
  if (value == nullptr) return list;
  list.reserve(value->count);
  for (std::uint64_t i = 0; i < value->count; ++i) {
    const std::optional<double> number = as_number(*value, i);
    if (!number || !std::isfinite(*number)) wrong_kind(key, "must be a list of finite numbers");
    list.push_back(*number);
  }
  return list;
}

}  // namespace tapetune::gguf
