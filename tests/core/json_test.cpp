// Tests of JSON values: conversion from braces, reading, and printing.
#include "json/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace logitless {
namespace {

TEST(JsonTest, BracesOfPairsThatBeginWithATextAreObjects) {
  EXPECT_EQ(Json({{"a", 1}, {"b", {2, 3}}}).dump(), R"({"a":1,"b":[2,3]})");
  EXPECT_EQ(Json({{"a", "b"}}).dump(), R"({"a":"b"})");
  EXPECT_EQ(Json({"a", "b"}).dump(), R"(["a","b"])");
  EXPECT_EQ(Json({{1, 2}, {"a", 3}}).dump(), R"([[1,2],["a",3]])");
  const Json one = {{"names", {"a"}}, {"none", nullptr}, {"flag", true}, {"big", UINT64_MAX}};
  EXPECT_EQ(one.dump(), R"({"names":["a"],"none":null,"flag":true,"big":18446744073709551615})");
  EXPECT_EQ(Json(std::vector<double>{0.5, 1.0}).dump(), "[0.5,1.0]");
  EXPECT_EQ(Json({{"a", 1}, {"b", 2}, {"a", 3}}).dump(), R"({"a":3,"b":2})");
}

TEST(JsonTest, WhatIsPrintedIsReadBack) {
  for (const char* text : {"null", "true", "-9223372036854775808", "9223372036854775807",
                           "18446744073709551615", "0.1", "1e-300", R"("\u0000\"\\é")", "[]", "{}",
                           "[[],{}]", R"({"b":[1,-2,3.5],"a":{"b":null}})"})
    EXPECT_EQ(Json::parse(text).dump(), text);
  EXPECT_EQ(Json::parse(R"({"a": [1, {"b": "c"}]})").dump(2),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": \"c\"\n    }\n  ]\n}");
  EXPECT_EQ(Json(std::nan("")).dump(), "null");
}

TEST(JsonTest, TheLastMemberOfANameCountsWhereTheFirstStood) {
  EXPECT_EQ(Json::parse(R"({"b":1,"a":2,"b":[3],"c":4,"b":5})").dump(), R"({"b":5,"a":2,"c":4})");
}

TEST(JsonTest, WhatIsNoJsonIsRefused) {
  for (const char* text : {"", "{", "[1,]", "nul", "1e999", "\"\xff\"", "[1] 2", "{\"a\"}"}) {
    EXPECT_THROW(Json::parse(text), JsonError) << text;
    EXPECT_FALSE(Json::try_parse(text).has_value()) << text;
  }
  try {
    Json::parse("[1,]");
    FAIL();
  } catch (const JsonError& error) {
    EXPECT_NE(std::string(error.what()).find("line 1, column 4"), std::string::npos)
        << error.what();
  }
}

TEST(JsonTest, DepthIsBounded) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') +
           std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_EQ(Json::parse(nested(Json::kMostDepth)).dump(), nested(Json::kMostDepth));
  EXPECT_THROW(Json::parse(nested(Json::kMostDepth + 1)), JsonError);
  EXPECT_FALSE(Json::try_parse(nested(1000000)).has_value());
}

TEST(JsonTest, KindsOfNumbers) {
  const Json below = Json::parse("-1"), whole = Json::parse("7"), real = Json::parse("7.0");
  EXPECT_TRUE(below.is_number_integer() && !below.is_number_unsigned());
  EXPECT_TRUE(whole.is_number_integer() && whole.is_number_unsigned());
  EXPECT_TRUE(real.is_number() && !real.is_number_integer());
  EXPECT_EQ(whole, real);
  EXPECT_EQ(whole, Json(7u));
  EXPECT_NE(Json(UINT64_MAX), Json(-1));
  EXPECT_NE(whole, Json("7"));
  EXPECT_EQ(Json::parse("18446744073709551615").get<std::uint64_t>(), UINT64_MAX);
  EXPECT_EQ(real.get<int>(), 7);
}

TEST(JsonTest, AValueOfAnotherKindIsRefused) {
  const Json object = {{"a", 1}};
  EXPECT_THROW(object.at("b"), JsonError);
  EXPECT_THROW(object.get<double>(), JsonError);
  EXPECT_THROW(object.at(std::size_t{0}), JsonError);
  EXPECT_THROW(object["a"].at("b"), JsonError);
  EXPECT_THROW(object["a"].get<bool>(), JsonError);
  EXPECT_THROW(object["a"].text(), JsonError);
  EXPECT_THROW(object["a"].get<std::vector<int>>(), JsonError);
  EXPECT_THROW(Json({1, 2}).at(2), JsonError);
  EXPECT_THROW(Json("text").push_back(1), JsonError);
  EXPECT_THROW(Json(true).get<int>(), JsonError);
}

TEST(JsonTest, MembersAreSetAndRemoved) {
  Json json;
  json["a"] = {"x"};
  json["b"]["c"] = 1;
  json.update({{"b", 2}, {"d", 3}});
  EXPECT_EQ(json.dump(), R"({"a":["x"],"b":2,"d":3})");
  json.erase("b");
  EXPECT_EQ(json.value("b", 4), 4);
  EXPECT_EQ(json.value("d", 4), 3);
  EXPECT_EQ(json.find("b"), nullptr);
  EXPECT_EQ(json.size(), 2u);
}

TEST(JsonTest, AnElementMayTakeThePlaceOfItsArray) {
  Json json = {{"a", {"a text that is longer than a short one", 2}}};
  json = json.at("a");
  json = std::move(json[0]);
  EXPECT_EQ(json, "a text that is longer than a short one");
}

TEST(JsonTest, TextThatIsNotUtf8) {
  const Json text("a\xff\xc3\xa9");
  EXPECT_THROW(text.dump(), JsonError);
  EXPECT_EQ(text.dump(-1, NotUtf8::replace), "\"a\xef\xbf\xbd\xc3\xa9\"");
  EXPECT_EQ(text.dump(-1, NotUtf8::replace_ascii), R"("a\ufffd\u00e9")");
}

}  // namespace
}  // namespace logitless
