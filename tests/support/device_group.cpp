#include "support/device_group.h"

#include <utility>

#include "kernels/device/stream.h"

namespace logitless::test {
namespace {

// Copies from the other ranks' memory, after all of them have written it and until all have read
// it. It does so on the streams, so that concurrent work proceeds.
class DeviceRank : public Communicator {
 public:
  explicit DeviceRank(std::shared_ptr<Communicator> host)
      : host_(std::move(host)), written_(cuda::make_event()), read_(cuda::make_event()) {}
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  DeviceKind device() const override { return DeviceKind::cuda; }
  bool capturable() const override { return false; }
  void all_gather(const void* mine, void* all, std::size_t bytes, void* stream) override {
    exchange(mine, all, bytes, 0, stream);
  }
  void all_to_all(const void* slices, void* of_all, std::size_t bytes, void* stream) override {
    exchange(slices, of_all, bytes, static_cast<std::size_t>(rank()) * bytes, stream);
  }
  void all_gather_host(const void* mine, void* all, std::size_t bytes) override {
    host_->all_gather(mine, all, bytes, nullptr);
  }
  void wait(void* stream, std::chrono::milliseconds limit) override {
    host_->wait(nullptr, limit);
    cuda::synchronize(stream);
  }
  void abort(std::string_view reason) noexcept override { host_->abort(reason); }

 private:
  void exchange(const void* mine, void* to, std::size_t bytes, std::size_t offset, void* stream) {
    struct Side {
      const std::byte* memory;
      void* written;
      void* read;
    };
    cuda::record_event(written_.get(), stream);
    const Side own = {static_cast<const std::byte*>(mine), written_.get(), read_.get()};
    std::vector<Side> theirs(static_cast<std::size_t>(size()));
    host_->all_gather(&own, theirs.data(), sizeof(own), nullptr);
    auto* out = static_cast<std::byte*>(to);
    for (const Side& side : theirs) {
      cuda::stream_wait(stream, side.written);
      if (bytes > 0 && side.memory + offset != out)
        cuda::copy_async(out, side.memory + offset, bytes, stream);
      out += bytes;
    }
    cuda::record_event(read_.get(), stream);
    host_->all_gather(nullptr, nullptr, 0, nullptr);
    for (const Side& side : theirs) cuda::stream_wait(stream, side.read);
  }

  std::shared_ptr<Communicator> host_;
  std::shared_ptr<void> written_, read_;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_device_group(int size,
                                                             std::chrono::milliseconds limit) {
  std::vector<std::shared_ptr<Communicator>> ranks = make_thread_group(size, limit);
  for (auto& rank : ranks) rank = std::make_shared<DeviceRank>(std::move(rank));
  return ranks;
}

}  // namespace logitless::test
