-- data - texts, token files and tensors as batches, in an order that depends on the seed alone.
--
-- A token file of n ids is cut into windows of T + 1 ids, T apart: the first T are the inputs, the
-- last T the targets. Sample k of a run, counted over all time, is window k of an endless sequence
-- in which every epoch visits each window once, in an order of its own. It depends on seed and k
-- only: not on batch sizes, ranks, or on what was read before. So a resumed run goes on with the
-- next sample.
--
-- A loader has batch(step, n), step from 0 on. A batch is lazy, {inputs, targets}: objects with
-- rows(first, count) -> tensor, n samples and numel() entries. Any object with batch(step, n) that
-- gives such a pair, or a pair of tensors, can stand in for a loader.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"
local strict = require "rille.strict"

local data = strict("rille.data", {})

-- ---- options

local function check_integer(where, o, name, min)
  local value = o[name]
  if math.type(value) ~= "integer" or min and value < min then
    fail.usage("%s: %s must be an integer%s, got %s", where, name,
      min and " from " .. min .. " on" or "", expect.describe(value))
  end
end

-- {path, T = ...} -> a table by name, with defaults; unknown keys and wrong types are refused.
local function read_options(where, given, defaults, names)
  if type(given) == "string" then given = { given } end
  if type(given) ~= "table" then
    fail("%s takes a table, as in %s{\"text.txt\", T = 256}; got %s", where, where,
      expect.describe(given))
  end
  local o = {}
  for key, value in pairs(defaults) do o[key] = value end
  known(where, given, names)
  for key, value in pairs(given) do
    if type(key) == "string" then o[key] = value end
  end
  o.path = given[1]
  if type(o.path) ~= "string" then
    fail("%s needs the path of a file first, got %s", where, expect.describe(o.path))
  end
  check_integer(where, o, "T", 1)
  check_integer(where, o, "seed")
  if type(o.val) ~= "string" and not (type(o.val) == "number" and o.val >= 0 and o.val < 1) then
    fail.usage("%s: val must be the share of the text that is held out (0 <= val < 1) or the path "
      .. "of another file, got %s", where, expect.describe(o.val))
  end
  expect.option(where, "cache", o.cache, "path?")
  expect.option(where, "format", o.format, "string?")
  expect.option(where, "encode", o.encode, "function?")
  expect.option(where, "decode", o.decode, "function?")
  return o
end

-- ---- batches

-- Inputs (shift 0) or targets (shift 1) of n samples in a row.
---@class rille.Rows
local Rows = {}
Rows.__index = Rows

--- Samples first .. first + count - 1 of the batch: a tensor whose first dimension is `count`.
---@param first integer
---@param count integer
function Rows:rows(first, count)
  expect("rows", "first", first, "integer")
  expect("rows", "count", count, "integer")
  if first < 0 or count < 0 or first + count > self.n then
    fail("rows: samples %d to %d of a batch of %d (they count from 0)", first, first + count - 1,
      self.n)
  end
  return self.read(first, count)
end

--- All samples.
function Rows:tensor() return self.read(0, self.n) end

--- The number of entries of the tensor that rows(0, n) gives.
function Rows:numel() return self.n * self.entries end

local function new_rows(n, entries, read)
  return setmetatable({ n = n, entries = entries, read = read }, Rows)
end

local function tensor_rows(t)
  local n = t:size(0)
  return new_rows(n, n > 0 and t:numel() // n or 0,
    function(first, count) return t:slice(0, first, first + count) end)
end

local function check_tensors(where, list)
  expect(where, "the argument", list, "list")
  if #list == 0 then fail("%s needs tensors, as in %s{x, y}", where, where) end
  for i, t in ipairs(list) do
    if not rille.is_tensor(t) or t:ndim() == 0 then
      fail("%s: entry %d is %s, not a tensor with a first dimension of samples", where, i,
        rille.is_tensor(t) and "a single number" or type(t))
    end
    if t:size(0) ~= list[1]:size(0) then
      fail("%s: entry 1 has %d samples, entry %d has %d", where, list[1]:size(0), i, t:size(0))
    end
  end
end

--- Tensors as a batch: rille.data.batch{x, y}; the first dimension counts samples.
---@param list table
function data.batch(list)
  check_tensors("data.batch", list)
  local batch = { n = list[1]:size(0) }
  for i, t in ipairs(list) do batch[i] = tensor_rows(t) end
  return batch
end

-- ---- loaders

---@class rille.Loader
---@field n_windows integer samples of an epoch
local Loader = {}
Loader.__index = Loader

-- The window of a sample.
function Loader:window(sample)
  if not self.shuffled then return sample % self.n_windows end
  return core.order_window(self.seed, sample, self.n_windows)
end

--- How many batches of n samples it takes to see everything once; the last may be smaller.
---@param n integer samples
function Loader:n_batches(n)
  expect("n_batches", "n", n, "positive")
  return (self.n_windows + n - 1) // n
end

--- Samples first .. first + n - 1, counted over all time.
---@param first integer
---@param n integer
function Loader:samples(first, n)
  local batch = { n = n }
  for i, part in ipairs(self.parts) do
    batch[i] = new_rows(n, part.entries, function(at, count)
      local windows = {}
      for k = 1, count do windows[k] = self:window(first + at + k - 1) end
      return part.read(windows)
    end)
  end
  return batch
end

--- The batch of a step, from 0 on. A loader for training gives n samples of an endless, shuffled
--- sequence; one for evaluation walks the windows in order, begins again after the last, and its
--- last batch may be smaller.
---@param step integer
---@param n integer samples
function Loader:batch(step, n)
  if math.type(step) ~= "integer" or step < 0 or math.type(n) ~= "integer" or n < 1 then
    fail("batch(step, n) wants a step from 0 on and a number of samples from 1 on, got %s and %s",
      tostring(step), tostring(n))
  end
  if self.shuffled then
    if n > self.n_windows then self:too_small(n) end
    return self:samples(step * n, n)
  end
  local first = step % self:n_batches(n) * n
  return self:samples(first, math.min(n, self.n_windows - first))
end

local function new_loader(fields) return setmetatable(fields, Loader) end

-- ---- loaders of tokens

local function too_few_windows(self, n)
  fail("%s: %d tokens %s make %d windows of T = %d, a batch needs %d (%d tokens)\n"
    .. "    hint: more text, a smaller T or a smaller batch", self.name, self.n_tokens, self.part,
    self.n_windows, self.T, n, n * self.T + 1)
end

-- A loader over ids start .. start + n_tokens - 1 of a file. part: "for training".
local function token_loader(file, o, start, n_tokens, part, name)
  local T = o.T
  local function read(shift)
    return function(windows)
      for i, window in ipairs(windows) do windows[i] = start + window * T + shift end
      return file:rows(windows, T)
    end
  end
  local loader = new_loader {
    n_windows = core.order_n_windows(n_tokens, T), n_tokens = n_tokens, T = T, seed = o.seed,
    shuffled = part == "for training", part = part, name = name, too_small = too_few_windows,
    parts = { { entries = T, read = read(0) }, { entries = T, read = read(1) } },
  }
  if loader.n_windows == 0 then too_few_windows(loader, 1) end
  return loader
end

-- What data.text and data.tokens give: loaders for training and for evaluation.
---@class rille.Dataset
---@field train rille.Loader
---@field val rille.Loader? nil if val = 0
---@field vocab integer ids are in [0, vocab)
---@field encode fun(text: string): any ids as an i64 tensor
---@field decode fun(ids: any): string
local Dataset = {}
Dataset.__index = Dataset

--- The batch of a training step: data can stand where its loader `train` does.
function Dataset:batch(step, n) return self.train:batch(step, n) end

local function new_dataset(o, open)
  local file = open(o.path)
  local n = file:count()
  local set = setmetatable({ vocab = o.vocab, encode = o.encode, decode = o.decode }, Dataset)
  if type(o.val) == "string" then
    local val = open(o.val)
    set.train = token_loader(file, o, 0, n, "for training", o.path)
    set.val = token_loader(val, o, 0, val:count(), "for evaluation", o.val)
    return set
  end
  local n_val = math.ceil(n * o.val)
  set.train = token_loader(file, o, 0, n - n_val, "for training", o.path)
  if n_val > 0 then
    set.val = token_loader(file, o, n - n_val, n_val,
      ("for evaluation (val = %g)"):format(o.val), o.path)
  end
  return set
end

-- ---- bytes as tokens

local function encode_bytes(text)
  expect("encode", "text", text, "string")
  return rille.tensor(text, { dtype = "i64" })
end

local function decode_bytes(ids)
  expect("decode", "ids", ids, "ids")
  if rille.is_tensor(ids) then ids = ids:view(-1):tolist() end
  local parts = {}
  for i, id in ipairs(ids) do
    if math.type(id) ~= "integer" or id < 0 or id > 255 then
      fail("decode: id %s at place %d is no byte (0 to 255)", tostring(id), i - 1)
    end
    parts[i] = string.char(id)
  end
  return table.concat(parts)
end

-- Opens the token file of a text, making it first if it is missing or older than the text.
local function open_text(path, cache)
  local source = core.stat(path)
  if not source then
    fail("data.text: there is no file %s\n    hint: any text will do; scripts/prepare_kjv writes "
      .. "the one of the demo", path)
  end
  local target = cache .. ".tokens"
  local made = core.stat(target)
  if made then
    local is_tokens, file = pcall(core.tokens_open, target, "llm.c")
    if not is_tokens then
      fail("data.text keeps its token file in %s, but what is there is none or is damaged:\n"
        .. "    %s\n    hint: delete it, or give cache = another path", target, tostring(file))
    end
    if made.modified > source.modified and file:count() == source.size then return file end
    file:close()
  end
  core.tokens_from_text(path, target)
  return core.tokens_open(target, "llm.c")
end

--- A text file, byte by byte (vocabulary 256): rille.data.text{"kjv.txt", T = 256}. Its token file
--- <cache>.tokens is made at the first use, and again when the text changes.
---@param options table {path, T = 256, val = 0.1 (share held out, from the end; or the path of a
--- second text), seed = 0, cache = path}
---@return rille.Dataset
function data.text(options)
  local o = read_options("data.text", options, { T = 256, val = 0.1, seed = 0 },
    { "T", "val", "seed", "cache" })
  o.vocab, o.encode, o.decode = 256, encode_bytes, decode_bytes
  return new_dataset(o, function(path)
    return open_text(path, path == o.path and o.cache or path)
  end)
end

-- ---- prepared token files

local function no_tokenizer(what)
  return function()
    fail("data.tokens knows ids only: to %s, give it %s = function(%s) ... end", what, what,
      what == "encode" and "text" or "ids")
  end
end

--- A prepared token file (llm.c, Megatron; nanoGPT by name): rille.data.tokens{"train.bin",
--- vocab = 50257, T = 1024}. All ids are checked against vocab once.
---@param options table {path, T = 256, vocab = (required), format = "auto", val = 0.1 (share held
--- out, from the end; or the path of a second file), seed = 0, encode =, decode =}
---@return rille.Dataset
function data.tokens(options)
  local o = read_options("data.tokens", options, { T = 256, val = 0.1, seed = 0, format = "auto",
    encode = no_tokenizer "encode", decode = no_tokenizer "decode" },
    { "T", "vocab", "format", "val", "seed", "encode", "decode" })
  check_integer("data.tokens", o, "vocab", 1)
  return new_dataset(o, function(path)
    local file = core.tokens_open(path, o.format)
    file:check(o.vocab)
    return file
  end)
end

-- ---- tensors in memory

local function too_few_rows(self, n)
  fail("data.fixed has %d samples, a batch needs %d", self.n_windows, n)
end

--- Tensors in memory as a loader: rille.data.fixed{x, y, seed = 0}; the first dimension counts
--- samples. shuffled = false walks them in order, as an evaluation wants it.
---@param given table
---@return rille.Loader
function data.fixed(given)
  known("data.fixed", given, { "seed", "shuffled" })
  local list = type(given[1]) == "table" and given[1] or given
  expect.option("data.fixed", "seed", given.seed, "integer?")
  expect.option("data.fixed", "shuffled", given.shuffled, "boolean?")
  check_tensors("data.fixed", list)
  local n = list[1]:size(0)
  if n == 0 then fail("data.fixed: the tensors have no samples") end
  local parts = {}
  for i, t in ipairs(list) do
    parts[i] = { entries = t:numel() // n, read = function(windows)
      return t:index_select(rille.tensor(windows, { dtype = "i64" }), 0)
    end }
  end
  return new_loader {
    n_windows = n, parts = parts, seed = given.seed or 0, shuffled = given.shuffled ~= false,
    too_small = too_few_rows,
  }
end

return data
