// A SentencePiece BPE model as tokenizer.json, the format of Hugging Face's tokenizers.
#pragma once

#include <string>
#include <string_view>

namespace logitless::train {

// The same words for a text as `model`, a serialised BPE model without normalisation, gives its
// lines; but where the text has the name of a special word, "</s>", it is that word. Throws
// InvalidArgument when it is none.
std::string fast_tokenizer_json(std::string_view model);

}  // namespace logitless::train
