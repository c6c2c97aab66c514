-- checkpoint - writing and reading a trainer's whole state, exactly.
--
-- One safetensors file a checkpoint: model.<name>, buffer.<name>, optimizer.<state>.<name>, and a
-- JSON record
-- under the metadata key "rille". checkpoint.json beside it names the latest complete one. Both
-- appear by
-- rename, so an interruption at any point leaves the previous checkpoint usable.
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

local function all_tensors(trainer)
  local list = {}
  local function add(prefix, entries)
    for _, entry in ipairs(entries) do table.insert(list, { prefix .. entry[1], entry[2] }) end
  end
  add("model.", trainer.model:named_parameters())
  add("buffer.", trainer.model:named_buffers())
  add("optimizer.", trainer.optimizer:state())
  return list
end

-- 64 bits over all tensors' bytes, in order: what a damaged file does not have.
local function digest_of(tensors)
  local digest = 0
  for _, tensor in ipairs(tensors) do digest = core.digest(tensor, digest) end
  return ("%016x"):format(digest)
end

local function record_of(trainer, entries)
  local tensors = {}
  for i, entry in ipairs(entries) do tensors[i] = entry[2] end
  return {
    format = 1, digest = digest_of(tensors),
    step = trainer.step_count, samples_seen = trainer.samples_seen,
    random = rille.random_state(), optimizer = trainer.optimizer.name,
    optimizer_steps = trainer.optimizer.steps_done, fingerprint = trainer:fingerprint(),
  }
end

--- Writes a checkpoint to `path` (default: a file in the trainer's out directory); returns the
--- path.
function checkpoint.save(trainer, path)
  expect("Trainer:save", "path", path, "path?")
  local own = path == nil
  if own then
    if not trainer.out then fail("save needs a path, or a trainer with out") end
    core.make_directory(trainer.out)
    path = ("%s/checkpoint-%08d.safetensors"):format(trainer.out, trainer.step_count)
  end
  local entries = all_tensors(trainer)
  local record = record_of(trainer, entries)
  rille.save(path, entries, { rille = core.json_encode(record) })
  if own then
    core.write_atomic(trainer.out .. "/" .. POINTER,
      core.json_encode { step = record.step, file = path:match("[^/]+$") } .. "\n")
    checkpoint.prune(trainer, path)
  end
  return path
end

-- Old checkpoints of this run beyond the number to keep go.
function checkpoint.prune(trainer, path)
  local list = trainer.checkpoints
  for i, written in ipairs(list) do
    if written == path then table.remove(list, i) break end
  end
  table.insert(list, path)
  while #list > math.max(trainer.checkpoint_keep, 1) do os.remove(table.remove(list, 1)) end
end

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
  if not ok or type(record) ~= "table" or record.format ~= 1 then
    fail("%s has no trainer record: it is no checkpoint of a trainer\n"
      .. "  hint: model:load_state_dict reads plain weights", path)
  end
  return record
end

-- The trainer's tensors beside the file's: targets and values, in one order. Fails with all that
-- does not fit; `tensors` is used up.
local function match(trainer, path, tensors)
  local problems, targets, values = {}, {}, {}
  for _, entry in ipairs(all_tensors(trainer)) do
    local name, target = entry[1], entry[2]
    local value = tensors[name]
    local want = table.concat({ target:shape() }, ", ")
    local have = value and table.concat({ value:shape() }, ", ")
    if want == have and value:dtype() == target:dtype() then
      table.insert(targets, target)
      table.insert(values, value)
    else
      table.insert(problems, ("  %s %s[%s] %s"):format(name, target:dtype(), want,
        value and ("is %s[%s] in the file"):format(value:dtype(), have) or "is missing"))
    end
    tensors[name] = nil
  end
  for name in pairs(tensors) do table.insert(problems, "  " .. name .. " is not in this run") end
  if #problems > 0 then
    table.sort(problems)
    fail("%s does not fit this run:\n%s", path, table.concat(problems, "\n"))
  end
  return targets, values
end

--- Brings a trainer to the state of a checkpoint, exactly. Errors name what does not fit, or that
--- the file is damaged; nothing has changed then.
function checkpoint.resume(trainer, path)
  expect("Trainer:resume", "path", path, "path")
  path = locate(path)
  local tensors, metadata = rille.load(path)
  local record = read_record(path, metadata)
  local optimizer = trainer.optimizer
  if record.optimizer ~= optimizer.name then
    fail("%s was written with the optimizer %s, this run has %s", path, record.optimizer,
      optimizer.name)
  end
  local steps_done = optimizer.steps_done
  optimizer.steps_done = record.optimizer_steps -- decides which state there is
  local ok, targets, values = pcall(match, trainer, path, tensors)
  if not ok then
    optimizer.steps_done = steps_done
    error(targets, 0)
  end
  local digest = digest_of(values)
  if digest ~= record.digest then
    optimizer.steps_done = steps_done
    fail("%s is damaged: its tensors have the digest %s, its record says %s", path, digest,
      record.digest)
  end
  rille.no_grad(function()
    for i, target in ipairs(targets) do target:copy_(values[i]) end
  end)
  trainer.step_count, trainer.samples_seen = record.step, record.samples_seen
  rille.random_state(record.random)
  trainer.checkpoints = { path }
  trainer.resumed = true
  return record.step
end

--- After each step of the loop: a checkpoint when one is due, and the end when somebody asked for
--- it.
function checkpoint.after_step(trainer, metrics)
  local due = trainer.checkpoint_every > 0 and trainer.step_count % trainer.checkpoint_every == 0
  local signal = core.stop_requested()
  if due or (signal and trainer.out) then checkpoint.save(trainer) end
  if not signal then return end
  metrics:say(("%s: stopped after step %d%s"):format(signal, trainer.step_count,
    trainer.out and ", checkpoint written to " .. trainer.out or
    ", without a checkpoint (the trainer has no out directory)"))
  metrics:close()
  rille.exit(trainer.out and EXIT_STOPPED or 1)
end

return checkpoint
