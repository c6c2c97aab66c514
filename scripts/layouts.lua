-- layouts - what dp, tp and pp cost and save: memory of a rank by kind, bytes that it sends, for a
-- GPT of a few steps under each of some layouts. Usage: rille scripts/layouts.lua [options]
--
-- Without --row it starts itself under `rille -n` once for each layout, and prints the table.
local rille = require "rille"
local core, nn = rille.core, rille.nn
local gpt = require "models.gpt"

local o = rille.options {
  help = "Memory and messages of a GPT's training step by layout, the most of any rank.",
  { "layers", 6, "blocks", min = 1 },
  { "heads", 6, "attention heads", min = 1 },
  { "d", 384, "width", min = 1 },
  { "T", 256, "tokens of context", min = 1 },
  { "vocab", 256, "tokens known", min = 1 },
  { "global", 8, "samples a step", min = 1 },
  { "micro", 2, "samples a microbatch", min = 1 },
  { "row", false, "print one row, under the layout given" },
  parallel = true,
}

local kinds <const> = { "parameters", "gradients", "optimizer", "activations", "communication" }
local axes <const> = { "tp", "dp", "pp" }
local ROW <const> = ("n"):rep(#kinds + 1 + #axes)

-- The most that any rank has, of a packed list of numbers.
local function most(mine)
  local all = core.comm_world():size() > 1 and core.comm_world():all_gather(mine) or { mine }
  local out = {}
  for _, text in ipairs(all) do
    for i, value in ipairs { ROW:unpack(text) } do
      if i <= #kinds + 1 + #axes then out[i] = math.max(out[i] or 0, value) end
    end
  end
  return out
end

local function row()
  local steps = 3
  local trainer = rille.Trainer { model = gpt { layers = o.layers, heads = o.heads, d = o.d,
    T = o.T, vocab = o.vocab }, loss = nn.cross_entropy, seed = 1, log = 0,
    optimizer = { "adamw", lr = 3e-4, clip = 1.0 }, parallel = o.parallel,
    batch = { global = o.global, micro = o.micro } }
  local x = rille.randint(0, o.vocab, { o.global, o.T })
  trainer:step { x, x }
  local before = trainer.pipeline:communication()
  for _ = 2, steps do trainer:step { x, x } end
  local now, memory, list = trainer.pipeline:communication(), core.memory(), {}
  for i, kind in ipairs(kinds) do list[i] = memory[kind].peak end
  table.insert(list, memory.total.peak)
  for _, axis in ipairs(axes) do
    table.insert(list, now[axis] and (now[axis].bytes - before[axis].bytes) / (steps - 1) or 0)
  end
  local out = most(ROW:pack(table.unpack(list)))
  for i, value in ipairs(out) do out[i] = ("%.2f"):format(value / 2 ^ 20) end
  print("row " .. table.concat(out, " "))
end

local layouts <const> = {
  { 1, "" }, { 2, "--dp 2" }, { 2, "--tp 2" }, { 2, "--tp 2 --sequence-parallel" }, { 2, "--pp 2" },
  { 4, "--tp 2 --dp 2" }, { 4, "--tp 2 --pp 2" },
  { 8, "--dp 2 --tp 2 --pp 2 --stages-per-rank 2 --pp-schedule interleaved" },
}

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

local function start(ranks, options)
  local command = ("%s -n %d %s --row %s %s 2>&1"):format(quote(arg[-1]), ranks, quote(arg[0]),
    options, table.concat(arg, " "))
  local pipe = assert(io.popen(command))
  local words = pipe:read("a")
  pipe:close()
  local numbers = words:match("row ([^\n]*)")
  if not numbers then error(("%s\n%s"):format(command, words), 0) end
  return numbers
end

if o.row then return row() end
print(("GPT: %d blocks, d %d, T %d, %d samples a step in microbatches of %d; MiB, the most of any "
  .. "rank"):format(o.layers, o.d, o.T, o.global, o.micro))
print("| layout | " .. table.concat(kinds, " | ") .. " | total | sent a step: "
  .. table.concat(axes, " | ") .. " |")
print("|---" .. ("|--:"):rep(#kinds + 1 + #axes) .. "|")
for _, layout in ipairs(layouts) do
  local words = layout[2] == "" and "one process" or "`" .. layout[2] .. "`"
  print(("| %s | %s |"):format(words, (start(layout[1], layout[2]):gsub(" ", " | "))))
end
