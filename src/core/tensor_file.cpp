#include "logitless/tensor_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/file.h"
#include "core/npy.h"
#include "core/safetensors.h"
#include "logitless/memory.h"

namespace logitless {

static_assert(std::endian::native == std::endian::little,
              "both formats are little-endian and are not swapped");

struct TensorFile::Impl {
  std::string path;
  std::optional<MappedFile> mapping;  // unset for bytes in memory
  std::span<const std::byte> bytes;
  bool npy = false;
  TensorIndex index;
  std::vector<std::string> names;
  std::unordered_map<std::string, std::size_t> position;  // in index.tensors

  // Aligned copies of unaligned tensors, made on first use, null before.
  std::mutex copies_mutex;
  std::vector<Buffer> copies;

  void parse() {
    npy = has_npy_magic(bytes);
    index = npy ? parse_npy(bytes, path) : parse_safetensors(bytes, path);
    for (const StoredTensor& tensor : index.tensors) {
      position.emplace(tensor.name, names.size());
      names.push_back(tensor.name);
    }
    copies.resize(names.size());
  }

  std::size_t find(const std::string& name) const {
    if (npy) return 0;
    const auto found = position.find(name);
    if (found != position.end()) return found->second;
    std::string known;
    constexpr std::size_t kListed = 20;
    for (std::size_t i = 0; i < std::min(names.size(), kListed); ++i)
      known += concat(i ? ", " : "", quoted_text(names[i]));
    if (names.size() > kListed) known += concat(" and ", names.size() - kListed, " more");
    throw InvalidArgument(concat("'", path, "': no tensor ", quoted_text(name),
                                 "; there are: ", names.empty() ? "none" : known));
  }

  // Returns the tensor's bytes with this alignment: in place if possible, else a copy.
  const void* aligned_data(std::size_t tensor, std::size_t alignment) {
    const std::size_t begin = index.tensors[tensor].begin;
    const std::size_t size = index.tensors[tensor].end - begin;
    if (size == 0) return nullptr;
    const std::byte* data = bytes.data() + begin;
    if (std::bit_cast<std::uintptr_t>(data) % alignment == 0) return data;
    const std::lock_guard<std::mutex> lock(copies_mutex);
    if (copies[tensor].data() == nullptr) {
      Buffer copy(size);
      std::memcpy(copy.data(), data, size);
      copies[tensor] = std::move(copy);
    }
    return copies[tensor].data();
  }
};

TensorFile::TensorFile(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->mapping.emplace(path);
  impl_->bytes = impl_->mapping->bytes();
  impl_->parse();
}

TensorFile::TensorFile(std::span<const std::byte> bytes, const std::string& name)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = name;
  impl_->bytes = bytes;
  impl_->parse();
}

TensorFile::~TensorFile() = default;
TensorFile::TensorFile(TensorFile&&) noexcept = default;
TensorFile& TensorFile::operator=(TensorFile&&) noexcept = default;

const std::vector<std::string>& TensorFile::names() const { return impl_->names; }

bool TensorFile::contains(const std::string& name) const {
  return impl_->npy || impl_->position.contains(name);
}

ConstTensorView TensorFile::tensor(const std::string& name) const {
  const std::size_t position = impl_->find(name);
  const StoredTensor& stored = impl_->index.tensors[position];
  if (!stored.dtype) {
    throw InvalidArgument(concat("'", impl_->path, "': tensor ", quoted_text(name), " has dtype ",
                                 quoted_text(stored.dtype_text),
                                 "; expected F32, BF16, F16, I32, I64, I8 or F64"));
  }
  require(stored.shape.size() <= kMaxRank, "'", impl_->path, "': tensor ", quoted_text(name),
          " has rank ", stored.shape.size(), "; expected at most ", kMaxRank);
  const void* data = impl_->aligned_data(position, size_of(*stored.dtype));
  return ConstTensorView(data, *stored.dtype, stored.shape);
}

const std::map<std::string, std::string>& TensorFile::metadata() const {
  return impl_->index.metadata;
}

namespace {

// Sorts large elements first: the format forbids gaps, and this order keeps every tensor aligned.
std::vector<const NamedTensor*> file_order(std::span<const NamedTensor> tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->view.dtype()) > size_of(b->view.dtype());
  });
  return order;
}

}  // namespace

std::vector<std::byte> safetensors_bytes(std::span<const NamedTensor> tensors,
                                         const std::map<std::string, std::string>& metadata,
                                         std::size_t most) {
  const std::vector<const NamedTensor*> order = file_order(tensors);
  const std::string header = safetensors_header(order, metadata, "bytes");
  const auto text = std::as_bytes(std::span(header));
  std::vector<std::byte> made(text.begin(), text.end());
  for (const NamedTensor* tensor : std::span(order).first(std::min(most, order.size()))) {
    check(tensor->view.contiguous(), tensor->name, ": expected it contiguous");
    const auto* data = static_cast<const std::byte*>(tensor->view.data());
    made.insert(made.end(), data, data + tensor->view.bytes());
  }
  return made;
}

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata, FileUse use) {
  const std::vector<const NamedTensor*> order = file_order(tensors);
  const std::string header = safetensors_header(order, metadata, path);
  AtomicFile file(path, use);
  file.write(header.data(), header.size());
  for (const NamedTensor* tensor : order) write_elements(file, tensor->view);
  file.commit();
}

void write_file(const std::string& path, std::string_view bytes, FileUse use) {
  AtomicFile file(path, use);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

void check_writable(const std::string& path) { const AtomicFile file(path); }

void write_npy(const std::string& path, const ConstTensorView& tensor) {
  const std::string header = npy_header(tensor, path);
  AtomicFile file(path);
  file.write(header.data(), header.size());
  write_elements(file, tensor);
  file.commit();
}

}  // namespace logitless
