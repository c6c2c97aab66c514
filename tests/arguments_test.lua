-- What functions of the library say to arguments that they cannot take: the script's line, the
-- function, the argument, what is wanted and what was given; never words of Lua about insides.
local check = require "tests.check"
local rille = require "rille"
local nn = rille.nn

local tensor = rille.ones(2, 3)
local path = os.tmpname()

-- Calls fn(...) and looks at its words.
local function refused(words, fn, ...)
  local passed, message = pcall(fn, ...)
  check.ok(not passed, "nothing was refused where this is expected: " .. words)
  for _, inside in ipairs { "bad argument", "attempt to", "rille/" } do
    if tostring(message):find(inside, 1, true) then
      error(("raw words of Lua: %s"):format(message), 2)
    end
  end
  if not tostring(message):find(words, 1, true) then
    error(("the words are %q, expected %q"):format(tostring(message), words), 2)
  end
  if not tostring(message):find("^tests/arguments_test.lua:%d+: ") then
    error(("no line of the script in %q"):format(message), 2)
  end
end

local linear = nn.Linear { 2, 3 }
local function trainer(changes)
  local options = { model = linear, loss = nn.mse, optimizer = "sgd", batch = { global = 4 } }
  for key, value in pairs(changes or {}) do options[key] = value end
  return rille.Trainer(options)
end

check.test("functions of rille", function()
  refused("rille.load: path must be a path, got nil", function() rille.load() end)
  refused("rille.load: path must be a path, got 3", function() rille.load(3) end)
  refused("rille.save: path must be a path, got nil", function() rille.save() end)
  refused("rille.save: tensors must be a table, got nil", function() rille.save(path) end)
  refused("rille.save: entry 1 is 3", function() rille.save(path, { 3 }) end)
  refused("rille.save: entry a is 3", function() rille.save(path, { a = 3 }) end)
  refused("rille.save: metadata must be a table, got 3",
    function() rille.save(path, { a = tensor }, 3) end)
  refused("rille.help: name must be a string, got 3", function() rille.help(3) end)
  refused("checkpoint: the first argument must be a function, got string",
    function() rille.checkpoint("a") end)
  refused("checkpoint: the first argument must be a function, got no value",
    function() rille.checkpoint() end)
  refused("no_grad: the argument must be a function", function() rille.no_grad(3) end)
  refused("random_state: the state must be a table", function() rille.random_state(3) end)
  refused("manual_seed: the seed must be an integer", function() rille.manual_seed() end)
  refused("rille.op: the argument must be a table", function() rille.op() end)
  refused("rille.options: the argument must be a table, got nil", function() rille.options() end)
  refused("rille.options: a row must be a table or a string, got 3",
    function() rille.options { 3 } end)
  refused("rille.did_you_mean: name must be", function() rille.did_you_mean() end)
  refused("rille.did_you_mean: list must be", function() rille.did_you_mean("a", 3) end)
  refused("rille.exit: code must be an integer from 0 on, got the string \"a\"",
    function() rille.exit("a") end)
  refused("gradcheck: fn must be a function, got nil", function() rille.gradcheck() end)
  refused("gradcheck: inputs must be a list, got nil", function() rille.gradcheck(print) end)
  refused("gradcheck takes a table, got 3", function() rille.gradcheck(print, {}, 3) end)
  refused("rille.cross_entropy: logits must be a tensor", function() rille.cross_entropy() end)
  refused("rille.cross_entropy: target must be a tensor, got 3",
    function() rille.cross_entropy(tensor, 3) end)
  refused("rille.mse: target must be a tensor, got nil", function() rille.mse(tensor) end)
  refused("nn.mse: the target must be a tensor, got nil", function() nn.mse(tensor) end)
  refused("rille.add_loss: name must be a string", function() rille.add_loss() end)
  refused("rille.add_loss: value must be a tensor, got 3", function() rille.add_loss("a", 3) end)
  refused("linspace: last must be a number", function() rille.linspace(1) end)
  refused("full_like: the value must be a number", function() rille.full_like(tensor) end)
  refused("fill_: the value must be a number, got string", function() tensor:fill_("a") end)
  refused("to: what it becomes must be a string", function() tensor:to() end)
  refused("normal_: the mean must be a number", function() tensor:normal_("a") end)
end)

check.test("modules, layers, optimizers, data, sampling, metrics", function()
  refused("load_state_dict: state must be a path or a table, got nil",
    function() linear:load_state_dict() end)
  refused("load_state_dict: entry 1 is 3", function() linear:load_state_dict { 3 } end)
  refused("load_state_dict: entry weight is 3",
    function() linear:load_state_dict { weight = 3 } end)
  refused('load_state_dict has no option "strickt"; did you mean "strict"?',
    function() linear:load_state_dict({}, { strickt = false }) end)
  refused("on: fn must be a function, got nil", function() linear:on("") end)
  refused("get: path must be a string, got nil", function() linear:get() end)
  refused("save: path must be a path, got nil", function() linear:save() end)
  refused("buffer: tensor must be a tensor, got 3", function() linear:buffer("mean", 3) end)
  refused("nn.class needs a name", function() nn.class() end)
  refused("nn.class: the base of A must be a class", function() nn.class("A", linear) end)
  refused("nn.List: an entry must be a module, got 3", function() nn.List { 3 } end)
  refused("Repeat: fn must be a function, got 3", function() nn.Repeat(2, 3) end)
  refused("nn.Parameter: shape must be a list", function() nn.Parameter() end)
  refused('Linear: d_in must be an integer from 0 on, got the string "a"',
    function() nn.Linear { "a", 3 } end)
  refused("Linear: bias must be true or false, got 1", function() nn.Linear { 1, 3, bias = 1 } end)
  refused("Attention: d = 10 does not divide into 3 heads", function() nn.Attention { 10, 3 } end)
  refused("optim.new: a list of {name, parameter}", function() rille.optim.new() end)
  refused("optim.new: a list of {name, parameter}",
    function() rille.optim.new(linear, "sgd") end)
  local parameters = linear:named_parameters()
  local function optimizer(spec) return function() return rille.optim.new(parameters, spec) end end
  refused("the optimizer must be a string or a table, got nil", optimizer())
  refused("the optimizer must be a string or a table, got 3", optimizer(3))
  refused("sgd: groups must be a list, got 3", optimizer { "sgd", groups = 3 })
  refused("sgd: group 1 takes a table, got 3", optimizer { "sgd", groups = { 3 } })
  refused("schedule must be a string", optimizer { "sgd", schedule = 3 })
  refused('schedule cosine: total must be a number, got the string "a"',
    optimizer { "sgd", schedule = { "cosine", total = "a" } })
  refused('sgd: clip must be a number from 0 on, got the string "a"',
    optimizer { "sgd", clip = "a" })
  refused('sgd: clip_norm must be 2 or "inf", got 1', optimizer { "sgd", clip = 1, clip_norm = 1 })
  refused("sgd: nesterov must be true or false, got 3", optimizer { "sgd", nesterov = 3 })
  refused('step: scale must be a number, got the string "a"',
    function() optimizer "sgd"():step("a") end)
  refused("lr: step must be a number, got nil", function() optimizer "sgd"():lr() end)
  refused("data.text takes a table", function() rille.data.text() end)
  refused("data.text: T must be an integer from 1 on, got the string \"a\"",
    function() rille.data.text { path, T = "a" } end)
  refused("data.fixed: seed must be an integer",
    function() rille.data.fixed { tensor, seed = "a" } end)
  refused("data.fixed takes a table", function() rille.data.fixed() end)
  refused("n_batches: n must be an integer from 1 on, got nil",
    function() rille.data.fixed { tensor }:n_batches() end)
  refused("sample: the model must be a function, got nil", function() rille.sample() end)
  refused("sample: an id of the prompt must be an integer from 0 on, got the string \"a\"",
    function() rille.sample(linear, { "a" }, 1) end)
  refused("Metrics: dir must be a path, got 3", function() rille.Metrics { dir = 3 } end)
  refused("Metrics:step: the argument must be a table", function() rille.Metrics {}:step() end)
end)

check.test("every option of the trainer, with values of four wrong types", function()
  local wrong = { "a", -1, {}, 1.5, false }
  local right = { -- what is right of these
    out = { a = true }, seed = { [-1] = true }, recompute = { [false] = true },
  }
  for _, name in ipairs { "fingerprint", "log", "steps", "seed", "out", "recompute", "nonfinite",
    "model", "loss" } do
    for _, value in ipairs(wrong) do
      if not (right[name] and right[name][value]) then
        refused("Trainer: " .. name .. " must be ", trainer, { [name] = value })
      end
    end
  end
  for _, name in ipairs { "batch", "checkpoint", "parallel" } do
    refused("Trainer: " .. name .. " must be a table, got 3", trainer, { [name] = 3 })
  end
  refused("Trainer: batch.global (samples a step) must be an integer from 1 on, got nil",
    trainer, { batch = {} })
  refused('checkpoint: every must be an integer from 0 on, got the string "a"',
    trainer, { checkpoint = { every = "a" } })
  refused("checkpoint: keep must be an integer from 1 on, got 0", trainer,
    { checkpoint = { keep = 0 } })
  refused("checkpoint.every needs out", trainer, { checkpoint = { every = 3 } })
  refused("Trainer takes a table, got nil", function() rille.Trainer() end)
  refused("Trainer needs model", function() rille.Trainer {} end)
end)

check.test("methods of the trainer", function()
  local t = trainer()
  refused("Trainer:resume: path must be a path, got nil", function() t:resume() end)
  refused("there is no no/where", function() t:resume("no/where") end)
  refused("Trainer:evaluate: the data must have a method batch(step, n), got nil",
    function() t:evaluate() end)
  refused("Trainer:evaluate: n must be an integer from 1 on, got 0",
    function() t:evaluate(rille.data.fixed { tensor }, 0) end)
  refused("Trainer:steps: the data must have a method batch(step, n), got 3",
    function() t:steps(3) end)
  refused("Trainer:steps: n must be an integer from 0 on, got nil",
    function() t:steps(rille.data.fixed { tensor }) end)
  refused("Trainer:step: the batch must be a table, got nil", function() t:step() end)
  refused("Trainer:step: a batch is {inputs, targets}", function() t:step { 3 } end)
  refused("entry 2 is 3", function() t:step { tensor, 3 } end)
  refused("Trainer:save: path must be a path, got 3", function() t:save(3) end)
  refused("save needs a path, or a trainer with out", function() t:save() end)
  refused("Trainer:say", function() t:say("%d", "a") end)
end)

check.test("a misspelt field is told with the nearest name", function()
  refused('rille has no field "Trainr"; did you mean "Trainer"?', function() rille.Trainr {} end)
  refused('rille has no field "randm"', function() return rille.randm end)
  refused('nn has no field "LayerNrm"; did you mean "LayerNorm"?', function() nn.LayerNrm(3) end)
  refused('rille.data has no field "txt"; did you mean "text"?', function() rille.data.txt {} end)
  refused('rille.optim has no field "nwe"', function() return rille.optim.nwe end)
  check.equal(rawget(rille, "Trainr"), nil)
  check.equal({ rille[1], nn[true] }, {})
end)

check.test("indices that are none", function()
  refused('"x" is neither a method of tensors nor an index', function() return tensor["x"] end)
  refused("an index is like", function() return tensor["x"] end)
  refused('tensors have no method "summ"\n    hint: did you mean "sum"?',
    function() return tensor:summ() end)
  refused('index: "0:2:1:3" is not understood', function() return tensor["0:2:1:3"] end)
  refused('a tensor has no field "x" to assign', function() tensor["x"] = 1 end)
end)

check.test("constructors take positional values, one table, or names", function()
  for _, drop in ipairs { nn.Dropout(0.1), nn.Dropout { 0.1 }, nn.Dropout { p = 0.1 } } do
    check.equal(drop.p, 0.1)
  end
  for _, act in ipairs { nn.Activation "gelu", nn.Activation { "gelu" },
    nn.Activation { name = "gelu" } } do
    check.equal(act.name, "gelu")
  end
  check.equal(tostring(nn.Linear { d_in = 2, d_out = 3 }), tostring(nn.Linear(2, 3)))
  check.equal(tostring(nn.Linear(2, 3, { bias = false })),
    tostring(nn.Linear { 2, 3, bias = false }))
  check.equal(tostring(nn.LayerNorm { d = 4 }), tostring(nn.LayerNorm(4)))
  check.equal(tostring(nn.RMSNorm { 4 }), tostring(nn.RMSNorm(4)))
  check.equal(tostring(nn.MLP { 4, 8 }), tostring(nn.MLP(4, 8)))
  check.equal(tostring(nn.Attention { 4, 2 }), tostring(nn.Attention(4, 2)))
  check.equal(tostring(nn.TokenEmbedding { 4, 2 }), tostring(nn.TokenEmbedding(4, 2)))
  local function layer() return nn.Linear(2, 2) end
  check.equal(tostring(nn.Repeat { 2, layer }), tostring(nn.Repeat(2, layer)))
  refused('Dropout has no option "q"', function() nn.Dropout { q = 0.1 } end)
  refused("Dropout: p must be in [0, 1), not 1", function() nn.Dropout { p = 1 } end)
  refused("Dropout needs p", function() nn.Dropout() end)
end)

os.remove(path)
check.done()
