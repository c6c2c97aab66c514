-- sample_test - what rille.sample draws from known logits, and what it leaves alone.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local nn <const> = require "rille.nn"

-- A "model" whose logits for the next token are a list, whatever the ids; it records its inputs.
local function fixed_model(logits)
  local inputs = {}
  return function(ids)
    table.insert(inputs, ids:tolist()[1])
    local rows = {}
    for i = 1, ids:size(1) do
      rows[i] = i == ids:size(1) and logits or {}
      for v = 1, #logits do rows[i][v] = rows[i][v] or 100.0 - v end
    end
    return rille.tensor { rows }
  end, inputs
end

local function counts(logits, n, options)
  local found = {}
  for v = 1, #logits do found[v] = 0 end
  options = options or {}
  options.context = 1
  for _, id in ipairs(rille.sample(fixed_model(logits), { 0 }, n, options)) do
    found[id + 1] = found[id + 1] + 1
  end
  return found
end

-- softmax(logits / temperature) by its formula.
local function softmax(logits, temperature)
  local out, sum = {}, 0
  for i, x in ipairs(logits) do
    out[i] = math.exp(x / temperature)
    sum = sum + out[i]
  end
  for i, w in ipairs(out) do out[i] = w / sum end
  return out
end

-- Five standard deviations of a share of n draws.
local function near_shares(found, want, n)
  for i, p in ipairs(want) do
    check.near(found[i] / n, p, 5 * math.sqrt(p * (1 - p) / n) + 1e-9, "token " .. i - 1)
  end
end

local logits <const> = { 1.0, 0.0, 2.0, -1.0, 0.5 }

check.test("the shares of tokens are softmax(logits / temperature)", function()
  for _, temperature in ipairs { 0.5, 1, 2 } do
    near_shares(counts(logits, 3000, { temperature = temperature }), softmax(logits, temperature),
      3000)
  end
end)

check.test("top_k: only the k likeliest, in their proportions", function()
  local want = softmax({ 1.0, 2.0, 0.5 }, 1)
  near_shares(counts(logits, 3000, { top_k = 3 }), { want[1], 0, want[2], 0, want[3] }, 3000)
  check.equal(counts(logits, 50, { top_k = 1 }), { 0, 0, 50, 0, 0 })
  near_shares(counts(logits, 1000, { top_k = 9 }), softmax(logits, 1), 1000)
end)

check.test("top_p: the fewest likeliest that make up p", function()
  -- the shares, sorted: 0.56, 0.21, 0.13, 0.08, 0.03
  local p = softmax(logits, 1)
  check.ok(p[3] < 0.6 and p[3] + p[1] > 0.6)
  near_shares(counts(logits, 2000, { top_p = 0.6 }),
    { p[1] / (p[1] + p[3]), 0, p[3] / (p[1] + p[3]), 0, 0 }, 2000)
  check.equal(counts(logits, 50, { top_p = 0.5 }), { 0, 0, 50, 0, 0 })
  check.equal(counts(logits, 50, { top_p = 1e-9 }), { 0, 0, 50, 0, 0 })
  check.equal(counts(logits, 300, { top_p = 0.9, top_k = 2 })[5], 0)
end)

check.test("temperature 0 takes the likeliest, the first of equal ones", function()
  check.equal(rille.sample(fixed_model(logits), { 0 }, 3, { temperature = 0 }), { 2, 2, 2 })
  check.equal(rille.sample(fixed_model { 1.0, 5.0, 5.0 }, { 0 }, 1, { temperature = 0 }), { 1 })
end)

check.test("a token without probability is never drawn", function()
  local found = counts({ -math.huge, 0.0, -math.huge, 0.0, -math.huge }, 500)
  check.equal({ found[1], found[3], found[5] }, { 0, 0, 0 })
end)

check.test("deterministic: the seed decides, and not math.random", function()
  local function draw(seed) return rille.sample(fixed_model(logits), { 0 }, 40, { seed = seed }) end
  math.randomseed(1)
  local a = draw(3)
  math.randomseed(2)
  check.equal(draw(3), a)
  check.ok(table.concat(draw(4), " ") ~= table.concat(a, " "))
  local first = rille.sample(fixed_model(logits), { 0 }, 10, { seed = 3 })
  check.equal(first, table.move(a, 1, 10, 1, {}), "a longer sample begins otherwise")
end)

check.test("what is drawn is fed back; a context is cut from the left", function()
  local model, inputs = fixed_model { 0.0, 9.0, 0.0 }
  check.equal(rille.sample(model, { 2, 2, 0 }, 3, { temperature = 0 }), { 1, 1, 1 })
  check.equal(inputs, { { 2, 2, 0 }, { 2, 2, 0, 1 }, { 2, 2, 0, 1, 1 } })
  model, inputs = fixed_model { 0.0, 9.0, 0.0 }
  local prompt = rille.tensor { 2, 2, 0, 0 }
  check.equal(rille.sample(model, prompt, 2, { temperature = 0, context = 2 }), { 1, 1 })
  check.equal(inputs, { { 0, 0 }, { 0, 1 } })
end)

check.test("on_token sees each token and may end the sampling", function()
  local seen = {}
  local ids = rille.sample(fixed_model(logits), { 0 }, 10, { on_token = function(id, i)
    table.insert(seen, id)
    return i < 2
  end })
  check.equal(#ids, 3)
  check.equal(seen, ids)
end)

-- A small real model with positions and dropout.
local function real_model(seed)
  rille.manual_seed(seed)
  return nn.Sequential {
    { "wte", nn.TokenEmbedding { 7, 8, positions = 5 } },
    { "drop", nn.Dropout(0.5) },
    { "head", nn.Linear { 8, 7 } },
  }
end

check.test("a model's own context bounds its input; modes and grad mode come back", function()
  local model = real_model(1)
  local drop = model:get "drop"
  drop:eval()
  local ids = rille.sample(model, { 1, 2, 3 }, 12, { seed = 5 })
  check.equal(#ids, 12)
  check.equal({ model.training, drop.training }, { true, false })
  model:train()
  check.equal(rille.sample(model, { 1, 2, 3 }, 12, { seed = 5 }), ids, "dropout was on")
  check.ok(rille.is_grad_enabled())
  check.raises(function()
    rille.sample(model, { 1 }, 2, { on_token = function() error "enough" end })
  end, "enough")
  check.equal({ model.training, drop.training, rille.is_grad_enabled() }, { true, true, true })
end)

check.test("NaN and infinite logits are errors with words", function()
  check.raises(function() rille.sample(fixed_model { 0.0, 0 / 0 }, { 0 }, 1) end,
    "sample_test.lua:%d+: ", "sample: the logits for token 0 hold NaN; the model's weights")
  check.raises(function()
    rille.sample(fixed_model { 0.0, 0 / 0 }, { 0 }, 1, { temperature = 0 })
  end, "hold NaN")
  check.raises(function() rille.sample(fixed_model { 0.0, math.huge }, { 0 }, 1) end,
    "hold infinity")
  check.raises(function() rille.sample(fixed_model { -math.huge, -math.huge }, { 0 }, 1) end,
    "all logits for token 0 are %-infinity")
end)

check.test("arguments are checked", function()
  local model = fixed_model(logits)
  local function refused(words, ids, n, options)
    check.raises(function() rille.sample(model, ids, n, options) end,
      "sample_test.lua:%d+: sample", words)
  end
  refused("the prompt is empty", {}, 1)
  refused('the prompt must be a list or a tensor of ids, got the string "In"', "In", 1)
  refused("n must be an integer from 0 on, got %-1", { 0 }, -1)
  refused('no option "temprature"; did you mean "temperature"', { 0 }, 1, { temprature = 1 })
  refused("temperature must be a number from 0 %(the likeliest%) on, got %-1", { 0 }, 1,
    { temperature = -1 })
  refused("top_p must be a number above 0 and up to 1 %(all%), got 0", { 0 }, 1, { top_p = 0 })
  refused("top_k must be an integer from 0 %(all%) on, got 2.5", { 0 }, 1, { top_k = 2.5 })
  refused("context must be an integer from 1 on, got 0", { 0 }, 1, { context = 0 })
  check.equal(rille.sample(model, { 0 }, 0), {})
  check.raises(function() rille.sample(function(x) return x end, { 0 }, 1) end,
    "not logits %[1, T, V%]")
end)

check.done()
