-- checkpoint - writing and reading a trainer's whole state, exactly, under any layout.
--
-- Tensors are kept by name: model.<name>, buffer.<name>, optimizer.<state>.<name>. One rank writes
-- one safetensors file; several write one each (checkpoint-00000010-00002-of-00004.safetensors),
-- with an index beside them, and every rank reads the tensors that it holds. The metadata has a
-- JSON record of the run under the key "rille", and under "rille.digests.<file>" a digest of each
-- tensor. checkpoint.json names the latest complete checkpoint. All of them appear by rename, so an
-- interruption at any point leaves the previous checkpoint usable.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"

local checkpoint = {}

local POINTER = "checkpoint.json"
local EXIT_STOPPED = 75

--- Reads the trainer option checkpoint = {every =, keep =}.
function checkpoint.configure(trainer, spec)
  spec = spec or {}
  known("Trainer: checkpoint", spec, { "every", "keep" })
  expect.option("Trainer: checkpoint", "every", spec.every, "count?")
  expect.option("Trainer: checkpoint", "keep", spec.keep, "positive?")
  trainer.checkpoint_every = spec.every or 0
  trainer.checkpoint_keep = spec.keep or 2
  trainer.checkpoints = {}
  if trainer.checkpoint_every > 0 and not trainer.out then
    fail.usage("Trainer: checkpoint.every needs out, the directory to write to")
  end
end

-- The tensors of this rank: {name, tensor, is_mine}; is_mine says that this rank writes it. What
-- several ranks hold is shared out among replicas.
local function all_tensors(trainer)
  local l, list = trainer.layout, {}
  local replica, writes, params = l.mesh:at("dp"), {}, {}
  for _, p in ipairs(l.params) do
    writes[p.name] = p.owner == l.rank and p.index % l.dp == replica
    if p.is_here then table.insert(params, { p.name, p.tensor }) end
  end
  local function add(prefix, entries, is_mine)
    for _, entry in ipairs(entries) do
      table.insert(list, { prefix .. entry[1], entry[2], is_mine = is_mine(entry) })
    end
  end
  local function writes_parameter(entry) return writes[entry[1]] end
  local function writes_state(entry) return writes[entry.of] end
  add("model.", params, writes_parameter)
  add("buffer.", trainer.pipeline:buffers(), function() return replica == 0 end)
  add("optimizer.", trainer.optimizer:state(), writes_state)
  return list
end

-- 64 bits over a tensor's bytes: what a damaged file does not have.
local function digest_of(tensor) return ("%016x"):format(core.digest(tensor, 0)) end

local function record_of(trainer)
  return {
    format = 2, step = trainer.step_count, samples_seen = trainer.samples_seen,
    random = rille.random_state(), optimizer = trainer.optimizer.name,
    optimizer_steps = trainer.optimizer.steps_done, fingerprint = trainer:fingerprint(),
  }
end

-- ---- writing

-- This rank's file. Returns the names in it.
local function write_file(path, trainer, record, number)
  local entries, digests, names = {}, {}, {}
  for _, entry in ipairs(all_tensors(trainer)) do
    if entry.is_mine then
      table.insert(entries, { entry[1], entry[2] })
      table.insert(names, entry[1])
      digests[entry[1]] = digest_of(entry[2])
    end
  end
  if #entries == 0 then return names end
  rille.save(path, entries, { rille = core.json_encode(record),
    ["rille.digests." .. number] = core.json_encode(digests) })
  return names
end

-- The names of the files that a checkpoint of n ranks consists of.
local function shard_path(base, rank, n)
  return ("%s-%05d-of-%05d.safetensors"):format(base, rank + 1, n)
end

-- Every rank its file, then the index; the path of the index.
local function write_shards(path, trainer, record)
  local all = trainer.layout.mesh:all()
  local base, n = path:gsub("%.safetensors$", ""), all:size()
  local mine = shard_path(base, all:rank(), n)
  local names = write_file(mine, trainer, record, all:rank() + 1)
  local lists = all:all_gather(table.concat(names, "\n"))
  local index = base .. ".safetensors.index.json"
  if all:rank() == 0 then
    local map = {}
    for rank, text in ipairs(lists) do
      local file = shard_path(base, rank - 1, n):match("[^/]+$")
      for name in text:gmatch("[^\n]+") do map[name] = file end
    end
    core.write_atomic(index, core.json_encode { metadata = {}, weight_map = map } .. "\n")
  end
  return index
end

-- What a checkpoint that was written consists of: the index goes first.
local function files_of(path, n)
  if n == 1 then return { path } end
  local list, base = { path }, path:gsub("%.safetensors%.index%.json$", "")
  for rank = 0, n - 1 do table.insert(list, shard_path(base, rank, n)) end
  return list
end

--- Writes a checkpoint to `path` (default: a file in the trainer's out directory); returns the
--- path of the file, or of the index of several. Every rank calls it.
function checkpoint.save(trainer, path)
  expect("Trainer:save", "path", path, "path?")
  local own, all = path == nil, trainer.layout.mesh:all()
  if own then
    if not trainer.out then fail("save needs a path, or a trainer with out") end
    core.make_directory(trainer.out)
    path = ("%s/checkpoint-%08d.safetensors"):format(trainer.out, trainer.step_count)
  end
  local record = record_of(trainer)
  if all:size() == 1 then write_file(path, trainer, record, 1)
  else path = write_shards(path, trainer, record) end
  if own and all:rank() == 0 then
    core.write_atomic(trainer.out .. "/" .. POINTER,
      core.json_encode { step = record.step, file = path:match("[^/]+$") } .. "\n")
    checkpoint.prune(trainer, path)
  end
  all:barrier()
  return path
end

-- Old checkpoints of this run beyond the number to keep go.
function checkpoint.prune(trainer, path)
  local list, n = trainer.checkpoints, trainer.layout.mesh:all():size()
  for i, written in ipairs(list) do
    if written.path == path then table.remove(list, i) break end
  end
  table.insert(list, { path = path, files = files_of(path, n) })
  while #list > math.max(trainer.checkpoint_keep, 1) do
    for _, file in ipairs(table.remove(list, 1).files) do os.remove(file) end
  end
end

-- ---- reading

-- The file that a path means: itself, or what checkpoint.json in the directory names.
local function locate(path)
  local pointer = path .. "/" .. POINTER
  local there = core.stat(path)
  if not there then
    fail("resume: there is no %s\n    hint: a checkpoint file is wanted, or a directory with %s",
      path, POINTER)
  end
  if not there.is_directory then return path end
  local f = io.open(pointer)
  if not f then
    fail("resume: the directory %s has no %s, which names the latest checkpoint: nothing was saved "
      .. "there\n    hint: a trainer writes it with out = %q and checkpoint = {every = 100}, or "
      .. "trainer:save()", path, POINTER, path)
  end
  local text = f:read("a")
  f:close()
  local ok, record = pcall(core.json_decode, text)
  if not ok or type(record) ~= "table" or type(record.file) ~= "string" then
    fail("%s is not a checkpoint pointer: %s", pointer, tostring(record))
  end
  return path .. "/" .. record.file
end

local function read_record(path, metadata)
  local ok, record = pcall(core.json_decode, metadata.rille or "")
  if not ok or type(record) ~= "table" or record.format ~= 2 then
    fail("%s has no trainer record%s\n  hint: model:load_state_dict reads plain weights", path,
      ok and type(record) == "table" and (" of format 2 but of format %s: another version of Rille "
        .. "wrote it"):format(record.format) or ": it is no checkpoint of a trainer")
  end
  return record
end

-- The digests of all tensors by name.
local function read_digests(metadata)
  local all = {}
  for key, text in pairs(metadata) do
    if key:find("^rille%.digests%.") then
      for name, digest in pairs(core.json_decode(text)) do all[name] = digest end
    end
  end
  return all
end

-- The names that the whole run has, over all ranks.
local function all_names(trainer)
  local names = {}
  for _, p in ipairs(trainer.layout.params) do
    names["model." .. p.name] = true
    for _, what in ipairs(trainer.optimizer:state_names(p.tensor)) do
      names["optimizer." .. what .. "." .. p.name] = true
    end
  end
  for _, entry in ipairs(trainer.model:named_buffers()) do names["buffer." .. entry[1]] = true end
  return names
end

-- This rank's tensors beside the file's: targets and values. Fails with all that does not fit.
local function match(trainer, path, file)
  local problems, targets, values, there = {}, {}, {}, {}
  for _, name in ipairs(file:names()) do there[name] = true end
  local digests = read_digests(file:metadata())
  for _, entry in ipairs(all_tensors(trainer)) do
    local name, target = entry[1], entry[2]
    local value = there[name] and file:read(name)
    local want = table.concat({ target:shape() }, ", ")
    local have = value and table.concat({ value:shape() }, ", ")
    if want == have and value:dtype() == target:dtype() then
      if digest_of(value) ~= digests[name] then
        fail("%s is damaged: the values of %s do not have the digest that was written with them",
          path, name)
      end
      table.insert(targets, target)
      table.insert(values, value)
    else
      table.insert(problems, ("  %s %s[%s] %s"):format(name, target:dtype(), want,
        value and ("is %s[%s] in the file"):format(value:dtype(), have) or "is missing"))
    end
  end
  local known_names = all_names(trainer)
  for name in pairs(there) do
    if not known_names[name] then table.insert(problems, "  " .. name .. " is not in this run") end
  end
  if #problems > 0 then
    table.sort(problems)
    fail("%s does not fit this run:\n%s", path, table.concat(problems, "\n"))
  end
  return targets, values
end

--- Brings a trainer to the state of a checkpoint, exactly, whatever layout wrote it. Errors name
--- what does not fit, or that the file is damaged; nothing has changed then.
function checkpoint.resume(trainer, path)
  expect("Trainer:resume", "path", path, "path")
  path = locate(path)
  local file = core.safetensors_open(path)
  local record = read_record(path, file:metadata())
  local optimizer = trainer.optimizer
  if record.optimizer ~= optimizer.name then
    fail("%s was written with the optimizer %s, this run has %s", path, record.optimizer,
      optimizer.name)
  end
  local steps_done = optimizer.steps_done
  optimizer.steps_done = record.optimizer_steps -- decides which state there is
  local ok, targets, values = pcall(match, trainer, path, file)
  if not ok then
    optimizer.steps_done = steps_done
    error(targets, 0)
  end
  rille.no_grad(function()
    for i, target in ipairs(targets) do target:copy_(values[i]) end
  end)
  file:close()
  trainer.step_count, trainer.samples_seen = record.step, record.samples_seen
  rille.random_state(record.random)
  trainer.checkpoints = {}
  if not path:find("%.json$") then trainer.checkpoints[1] = { path = path, files = { path } } end
  trainer.resumed = true
  return record.step
end

--- After each step of the loop: a checkpoint when one is due, and the end when somebody asked any
--- rank for it (signal: the name of what it got). is_latest: no step has been run since.
function checkpoint.after_step(trainer, metrics, is_latest, signal)
  local every = trainer.checkpoint_every
  local due = is_latest and every > 0 and trainer.step_count % every == 0
  if due or (signal and trainer.out) then checkpoint.save(trainer) end
  if not signal then return end
  metrics:say(("%s: stopped after step %d%s"):format(signal, trainer.step_count,
    trainer.out and ", checkpoint written to " .. trainer.out or
    ", without a checkpoint (the trainer has no out directory)"))
  metrics:close()
  rille.exit(trainer.out and EXIT_STOPPED or 1)
end

return checkpoint
