// Encodes texts with a tokenizer.json, for the comparison with Hugging Face's tokenizers:
//   encode_text TOKENIZER.json < TEXTS > IDS
// TEXTS has for each text its count of bytes, u32, and the bytes. IDS has first the count of token
// ids before a text, and these ids. It then has for each text the count of token ids, the ids, the
// count of decoded bytes, and these bytes. All counts are u32, ids i32. If the tokenizer is
// refused, the exit status is 1 and the message is printed.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "train/tokenizer/byte_level_tokenizer.h"

namespace {

void put(const void* data, std::size_t bytes) {
  std::cout.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
}
void put_count(std::size_t count) {
  const auto small = static_cast<std::uint32_t>(count);
  put(&small, sizeof(small));
}
void put_words(const std::vector<std::int32_t>& vocab_ids) {
  put_count(vocab_ids.size());
  put(vocab_ids.data(), vocab_ids.size() * sizeof(std::int32_t));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    std::ifstream file(argv[1], std::ios::binary);
    const std::string json{std::istreambuf_iterator<char>(file), {}};
    const logitless::train::ByteLevelTokenizer tokenizer(json);
    put_words(tokenizer.before_text());
    std::uint32_t size = 0;
    while (std::cin.read(reinterpret_cast<char*>(&size), sizeof(size))) {
      std::string text(size, '\0');
      std::cin.read(text.data(), size);
      std::vector<std::int32_t> vocab_ids;
      tokenizer.encode(text, vocab_ids);
      put_words(vocab_ids);
      const std::string bytes = tokenizer.bytes(vocab_ids);
      put_count(bytes.size());
      put(bytes.data(), bytes.size());
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
