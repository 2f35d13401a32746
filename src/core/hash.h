// Names for contents: the same bytes have the same name on every machine and in every version. It
// does not resist deliberate collisions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace logitless {

// FNV-1a of 128 bits as 32 hexadecimal digits.
inline std::string content_name(std::string_view content) {
  using Wide = unsigned __int128;
  constexpr Wide kPrime = (Wide{1} << 88) + 0x13b;
  Wide hash = (Wide{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
  for (const char c : content) hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  std::string name(32, '0');
  for (std::size_t i = name.size(); i-- > 0; hash >>= 4)
    name[i] = "0123456789abcdef"[static_cast<unsigned>(hash & 15)];
  return name;
}

}  // namespace logitless
