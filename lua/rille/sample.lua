-- sample - a model of the next token writes: rille.sample(model, ids, n, options).
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"

local sample = {}

local defaults = { temperature = 1, top_k = 0, top_p = 1, seed = 0 }
local names = { "temperature", "top_k", "top_p", "seed", "context", "on_token" }

local function check_range(o, name, good, valid)
  if type(o[name]) ~= "number" or not good then
    fail.usage("sample: %s must be %s, got %s", name, valid, expect.describe(o[name]))
  end
end

local function is_count(value) return math.type(value) == "integer" and value >= 0 end

local function read_options(given)
  local o = {}
  for key, value in pairs(defaults) do o[key] = value end
  if given then known("sample", given, names) end
  for key, value in pairs(given or {}) do o[key] = value end
  local t, p = tonumber(o.temperature) or -1, tonumber(o.top_p) or -1
  check_range(o, "temperature", t >= 0 and t < math.huge, "a number from 0 (the likeliest) on")
  check_range(o, "top_p", p > 0 and p <= 1, "a number above 0 and up to 1 (all)")
  check_range(o, "top_k", is_count(o.top_k), "an integer from 0 (all) on")
  check_range(o, "seed", math.type(o.seed) == "integer", "an integer")
  if o.context ~= nil then
    check_range(o, "context", is_count(o.context) and o.context > 0, "an integer from 1 on")
  end
  expect.option("sample", "on_token", o.on_token, "function?")
  return o
end

local function read_prompt(ids)
  if rille.is_tensor(ids) then return ids:view(-1):tolist() end
  expect("sample", "the prompt", ids, "ids")
  for _, id in ipairs(ids) do expect("sample", "an id of the prompt", id, "count") end
  return table.move(ids, 1, #ids, 1, {})
end

-- A model may be a plain function.
local function modules_of(model) return nn.is_module(model) and model:modules() or {} end

-- The longest input that the model takes: the fewest positions of its embeddings, if it has some.
local function longest_context(model)
  local longest = math.huge
  for _, module in ipairs(modules_of(model)) do
    local positions = rawget(module, "positions")
    if math.type(positions) == "integer" then longest = math.min(longest, positions) end
  end
  return longest
end

-- ---- from logits to an id

-- The k largest logits in falling order, and their ids.
local function largest(logits, k)
  local values, ids = logits:topk(k)
  return values:tolist(), ids:tolist()
end

-- Unnormalised probabilities of a list of logits, and their sum.
local function weigh(logits, temperature, place)
  local highest = -math.huge
  for _, value in ipairs(logits) do
    if value ~= value or value == math.huge then
      fail("sample: the logits for token %d hold %s; the model's weights or inputs are broken",
        place, value ~= value and "NaN" or "infinity")
    end
    if value > highest then highest = value end
  end
  if highest == -math.huge then fail("sample: all logits for token %d are -infinity", place) end
  local weights, sum = {}, 0
  for i, value in ipairs(logits) do
    weights[i] = math.exp((value - highest) / temperature)
    sum = sum + weights[i]
  end
  return weights, sum
end

-- The index at which the running sum of the weights passes `target`.
local function walk(weights, target)
  local sum, last = 0, 1
  for i, weight in ipairs(weights) do
    sum = sum + weight
    if weight > 0 then last = i end
    if sum > target then return i end
  end
  return last -- rounding
end

-- logits[V] -> an id; u is uniform in [0, 1).
local function pick(logits, o, u, place)
  local V = logits:numel()
  local list, ids = logits:tolist(), nil
  local weights, sum = weigh(list, o.temperature > 0 and o.temperature or 1, place)
  if o.temperature == 0 then return logits:argmax():item() end
  local k = o.top_k > 0 and math.min(o.top_k, V) or V
  if k < V or o.top_p < 1 then
    list, ids = largest(logits, k)
    weights, sum = weigh(list, o.temperature, place)
  end
  if o.top_p < 1 then -- the fewest that make up top_p (arXiv:1904.09751)
    local enough, n, kept = o.top_p * sum, 0, 0
    repeat
      n = n + 1
      kept = kept + weights[n]
    until kept >= enough or n == #weights
    sum = kept
    for i = n + 1, #weights do weights[i] = nil end
  end
  local at = walk(weights, u * sum)
  return ids and ids[at] or at - 1
end

-- Logits of the token after ids[first + 1 .. #ids].
local function next_logits(model, ids, first)
  local x = rille.tensor({ table.move(ids, first + 1, #ids, 1, {}) }, { dtype = "i64" })
  local out = core.scope(model, x)
  if not rille.is_tensor(out) or out:ndim() ~= 3 then
    fail("sample: the model gave %s for ids [1, T], not logits [1, T, V]",
      rille.is_tensor(out) and tostring(out) or type(out))
  end
  return out:slice(1, -1, out:size(1)):contiguous():view(-1)
end

local function generate(model, longest, ids, n, o)
  local context = math.min(o.context or math.huge, longest)
  local new = {}
  for i = 1, n do
    local logits = next_logits(model, ids, math.max(#ids - context, 0))
    local id = pick(logits, o, core.random_uniform(o.seed, "sample", i - 1), i - 1)
    table.insert(ids, id)
    table.insert(new, id)
    if o.on_token and o.on_token(id, i - 1) == false then break end
  end
  return new
end

--- Continues a sequence by n tokens; n = 0 only checks prompt and options. Deterministic: token i
--- is drawn with random number i of the seed. The model is in eval mode meanwhile, without
--- gradients.
---@param model any called with ids [1, T], gives logits [1, T, V]; or a trainer: then its model,
--- under any layout (every rank calls this, and gets the same ids)
---@param ids any the prompt: a list or a tensor, at least one id
---@param n integer
---@param options table? {temperature = 1 (0: always the likeliest), top_k = 0 (all), top_p = 1,
--- seed = 0, context = (the last ids that the model sees; default: what its embedding takes),
--- on_token = function(id, i), which ends the sampling when it returns false}
---@return integer[] ids the new ones
function sample.sample(model, ids, n, options)
  expect("sample", "the model", model, "function")
  local o = read_options(options)
  expect("sample", "n", n, "count")
  local prompt = read_prompt(ids)
  if #prompt == 0 then
    fail.usage("sample: the prompt is empty, the model needs at least one id")
  end
  local run, modes = model, {}
  if type(model) == "table" and type(model.predict) == "function" then
    model = model.model -- run stays the trainer, which can be called too
  end
  for _, module in ipairs(modules_of(model)) do
    table.insert(modes, { module, module.training })
    rawset(module, "training", false)
  end
  local _ <close> = setmetatable({}, { __close = function()
    for _, mode in ipairs(modes) do rawset(mode[1], "training", mode[2]) end
  end })
  return rille.no_grad(generate, run, longest_context(model), prompt, n, o)
end

return sample
