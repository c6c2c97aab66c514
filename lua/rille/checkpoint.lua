-- checkpoint - writing and reading a trainer's whole state, exactly, under any layout.
--
-- Tensors are kept by name: model.<name>, buffer.<name>, optimizer.<state>.<name>. One rank writes
-- one safetensors file; several write one each, with an index beside them, and every rank reads the
-- tensors that it holds:
--
--     checkpoint-00000010.safetensors.index.json
--     checkpoint-00000010-5f3a90c1-00002-of-00004.safetensors     5f3a90c1: the save's own token
--
-- Of a tensor that is cut over a tp group each rank writes its pieces (rille.pieces), one entry a
-- piece: <name>#<where it begins in the whole>. What several ranks have alike one of them writes.
--
-- The metadata has a JSON record of the run under the key "rille", whose `format` is 2, or 3 where
-- tensors are cut; under "rille.digests.<file>" a digest of each entry; under "rille.cut.<file>"
-- {"<name>": {"dim": 0, "shape": [the whole's]}} for the pieces in the file; and in files of
-- several under "rille.save.<file>" the token, which the index has too. The index's weight_map has
-- an entry for every piece. checkpoint.json names the latest complete checkpoint, and those that
-- are kept.
--
-- Invariants:
--  1. All files appear by rename, and no save writes to the files of another before its own are
--     whole: an interruption at any point leaves the previous checkpoint usable.
--  2. A save that fails on one rank fails on all, and takes away what it has written.
--  3. What is resumed is what one save has written: digests, tokens and fingerprint say so.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"
local pieces = require "rille.pieces"

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

-- The tensors of this rank: {name, tensor, is_mine =, cut =, shape = of the whole}; is_mine says
-- that this rank writes it, or its part of it. What several ranks hold is shared out among them.
local function all_tensors(trainer)
  local l, list = trainer.layout, {}
  local replica, params, by_name = l.mesh:at("dp"), {}, {}
  local tp, tp_rank = l.tp and l.tp.size or 1, l.tp and l.tp.rank or 0
  for _, p in ipairs(l.params) do
    local n, k = l.dp * tp, replica * tp + tp_rank
    if p.cut then n, k = l.dp, replica end
    by_name[p.name] = { is_mine = p.owner == l.rank and p.index % n == k, cut = p.cut,
      shape = p.shape }
    if p.is_here then table.insert(params, { p.name, p.tensor }) end
  end
  local function add(prefix, entries, about)
    for _, entry in ipairs(entries) do
      local of = about(entry)
      table.insert(list, { prefix .. entry[1], entry[2], is_mine = of.is_mine, cut = of.cut,
        shape = of.shape })
    end
  end
  add("model.", params, function(entry) return by_name[entry[1]] end)
  add("buffer.", trainer.pipeline:buffers(), function(entry)
    return { is_mine = replica == 0 and tp_rank == 0, shape = { entry[2]:shape() } }
  end)
  add("optimizer.", trainer.optimizer:state(), function(entry) return by_name[entry.of] end)
  return list
end

local function tp_rank_of(trainer) return trainer.layout.tp and trainer.layout.tp.rank or 0 end

-- 64 bits over a tensor's bytes: what a damaged file does not have.
local function digest_of(tensor)
  return ("%016x"):format(core.digest(rille.no_grad(function() return tensor:contiguous() end), 0))
end

local FORMAT <const>, FORMAT_WHOLE <const> = 3, 2 -- where tensors are cut, and where none is

local function record_of(trainer)
  local format = FORMAT_WHOLE
  for _, p in ipairs(trainer.layout.params) do
    if p.cut then format = FORMAT end
  end
  return {
    format = format, step = trainer.step_count, samples_seen = trainer.samples_seen,
    random = rille.random_state(), optimizer = trainer.optimizer.name,
    optimizer_steps = trainer.optimizer.steps_done,
    fingerprint = trainer.pipeline:common_fingerprint(),
  }
end

--- Runs f, which must not communicate, on every rank. Where it fails on one it fails on all: the
--- words of the failure, or nil and what f gives.
---@return string? words
function checkpoint.together(all, f, ...)
  local is_good, result = pcall(f, ...)
  local mine = is_good and "" or tostring(result)
  if all:size() == 1 then return not is_good and mine or nil, result end
  for rank, words in ipairs(all:all_gather(mine)) do
    if words ~= "" then
      return mine ~= "" and mine or ("on rank %d: %s"):format(rank - 1, words)
    end
  end
  return nil, result
end

-- ---- files

local function name_of(path) return path:match("[^/]+$") end
local function folder_of(path) return path:match("^(.*)/[^/]*$") or "." end

-- The JSON object in a file; nil, and why, where there is none.
local function read_object(path)
  local f <close>, why = io.open(path)
  if not f then return nil, why end
  local ok, object = pcall(core.json_decode, f:read("a"))
  if ok and type(object) == "table" then return object end
  return nil, ok and "it is no object" or tostring(object)
end

-- The token of the save that wrote an index; nil if there is none.
local function index_token(path)
  local index = read_object(path)
  return index and type(index.metadata) == "table" and index.metadata.save or nil
end

local function shard_path(base, token, rank, n)
  return ("%s-%s-%05d-of-%05d.safetensors"):format(base, token, rank + 1, n)
end

-- What a checkpoint consists of, the index first: of what it names, only what a save may have made.
local function files_of(path)
  local base = path:match("^(.*)%.safetensors%.index%.json$")
  local index, list, seen = base and read_object(path), { path }, {}
  if not index or type(index.weight_map) ~= "table" then return list end
  local stem = name_of(base)
  for _, name in pairs(index.weight_map) do
    local rest = type(name) == "string" and name:sub(1, #stem) == stem and name:sub(#stem + 1)
    if rest and rest:find("^%-%x+%-%d+%-of%-%d+%.safetensors$") and not seen[name] then
      seen[name] = true
      table.insert(list, folder_of(path) .. "/" .. name)
    end
  end
  return list
end

-- ---- writing

-- This rank's file, number `number`. Returns the names in it.
local function write_file(path, trainer, record, number, token)
  local entries, digests, names, cuts = {}, {}, {}, {}
  for _, entry in ipairs(all_tensors(trainer)) do
    local name, tensor, cut = entry[1], entry[2], entry.cut
    local mine = entry.is_mine and pieces.of(name, tensor, cut, tp_rank_of(trainer)) or {}
    for _, piece in ipairs(mine) do
      table.insert(entries, piece)
      table.insert(names, piece[1])
      digests[piece[1]] = digest_of(piece[2])
      cuts[name] = cut and { dim = cut.dim, shape = entry.shape }
    end
  end
  if #entries == 0 then return names end
  local metadata = { rille = core.json_encode(record),
    ["rille.digests." .. number] = core.json_encode(digests) }
  if next(cuts) then metadata["rille.cut." .. number] = core.json_encode(cuts) end
  if token then metadata["rille.save." .. number] = token end
  rille.save(path, entries, metadata)
  return names
end

-- A token that no earlier save of this name has.
local function new_token(base, n)
  local random <close> = assert(io.open("/dev/urandom", "rb"))
  local token
  repeat token = ("%08x"):format(("<I4"):unpack(random:read(4)))
  until not core.stat(shard_path(base, token, 0, n))
  return token
end

-- Every rank its file. Returns {path = of the index, token =, mine = this rank's file, weight_map =
-- what the index says}; or nil and words.
local function write_shards(path, trainer, record)
  local all = trainer.layout.mesh:all()
  local base, n, rank = path:gsub("%.safetensors$", ""), all:size(), all:rank()
  local token = all:all_gather(rank == 0 and new_token(base, n) or "")[1]
  local mine = shard_path(base, token, rank, n)
  local words, names = checkpoint.together(all, write_file, mine, trainer, record, rank + 1, token)
  if words then
    os.remove(mine)
    return nil, words
  end
  local map = {}
  for other, text in ipairs(all:all_gather(table.concat(names, "\n"))) do
    local file = name_of(shard_path(base, token, other - 1, n))
    for name in text:gmatch("[^\n]+") do map[name] = file end
  end
  return { path = base .. ".safetensors.index.json", token = token, mine = mine, weight_map = map }
end

-- The same for one rank: its file is the checkpoint.
local function write_whole(path, trainer, record)
  local was_there = core.stat(path)
  local words = checkpoint.together(trainer.layout.mesh:all(), write_file, path, trainer, record, 1)
  if not words then return { path = path, mine = path, was_there = was_there } end
  if not was_there then os.remove(path) end
  return nil, words
end

-- An index in place of an older one, whose files have no name then.
local function write_index(save)
  local old = files_of(save.path)
  save.was_there = core.stat(save.path)
  core.write_atomic(save.path,
    core.json_encode { metadata = { save = save.token }, weight_map = save.weight_map } .. "\n")
  for i = 2, #old do os.remove(old[i]) end
end

-- checkpoint.json names this checkpoint; old ones of this run beyond the number to keep go.
local function write_pointer(trainer, save, step)
  local list, old, names = {}, {}, {}
  for _, path in ipairs(trainer.checkpoints) do
    if path ~= save.path then table.insert(list, path) end
  end
  table.insert(list, save.path)
  while #list > math.max(trainer.checkpoint_keep, 1) do
    table.insert(old, table.remove(list, 1))
  end
  for i, path in ipairs(list) do names[i] = name_of(path) end
  core.write_atomic(trainer.out .. "/" .. POINTER,
    core.json_encode { step = step, file = name_of(save.path), kept = names } .. "\n")
  trainer.checkpoints = list
  for _, path in ipairs(old) do
    for _, file in ipairs(files_of(path)) do os.remove(file) end
  end
end

-- On rank 0, after a failure: whether this save's files are all there is under their name, because
-- an index or a file was replaced, or because checkpoint.json names them already.
local function is_in_place(trainer, save, own)
  if save.token and index_token(save.path) ~= save.token then return false end
  local pointer = own and read_object(trainer.out .. "/" .. POINTER)
  return save.was_there or not own or pointer and pointer.file == name_of(save.path)
end

-- Rank 0 makes the files of all a checkpoint. Returns words if that failed, and whether the files
-- of this save stay.
local function publish(trainer, save, step, own)
  local all = trainer.layout.mesh:all()
  local is_first = all:rank() == 0
  local words = checkpoint.together(all, function()
    if is_first and save.token then write_index(save) end
    if is_first and own then write_pointer(trainer, save, step) end
  end)
  if not words then return nil end
  local stays = is_first and is_in_place(trainer, save, own)
  if is_first and not stays and index_token(save.path) == save.token then os.remove(save.path) end
  if all:size() > 1 then stays = all:all_gather(stays and "stays" or "")[1] == "stays" end
  if not stays then os.remove(save.mine) end
  return words, stays
end

--- Writes a checkpoint to `path` (default: a file in the trainer's out directory); returns the
--- path of the file, or of the index of several. Every rank calls it; what fails on one, as on a
--- full disk, fails on all, and leaves the previous checkpoint and nothing else.
function checkpoint.save(trainer, path)
  expect("Trainer:save", "path", path, "path?")
  local own, all = path == nil, trainer.layout.mesh:all()
  if own then
    if not trainer.out then fail("save needs a path, or a trainer with out") end
    core.make_directory(trainer.out)
    path = ("%s/checkpoint-%08d.safetensors"):format(trainer.out, trainer.step_count)
  end
  local record = record_of(trainer)
  local save, words = (all:size() == 1 and write_whole or write_shards)(path, trainer, record)
  local stays
  if save then words, stays = publish(trainer, save, record.step, own) end
  if words then
    error(words .. "\n  " .. (stays and "the files of this save are in place, whole: " .. save.path
      or "what this save had written is removed; earlier checkpoints are as they were"), 0)
  end
  return save.path
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
  if not core.stat(pointer) then
    fail("resume: the directory %s has no %s, which names the latest checkpoint: nothing was saved "
      .. "there\n    hint: a trainer writes it with out = %q and checkpoint = {every = 100}, or "
      .. "trainer:save()", path, POINTER, path)
  end
  local record, why = read_object(pointer)
  if not record or type(record.file) ~= "string" then
    fail("%s is not a checkpoint pointer: %s", pointer, why or "it names no file")
  end
  return path .. "/" .. record.file
end

local function read_record(path, metadata)
  local ok, record = pcall(core.json_decode, metadata.rille or "")
  if not ok or type(record) ~= "table" or record.format ~= FORMAT and
    record.format ~= FORMAT_WHOLE then
    fail("%s has no trainer record%s\n  hint: model:load_state_dict reads plain weights", path,
      ok and type(record) == "table" and (" of format %d or %d but of format %s: another version "
        .. "of Rille wrote it"):format(FORMAT_WHOLE, FORMAT, record.format)
      or ": it is no checkpoint of a trainer")
  end
  return record
end

-- What the files say of their entries under "rille.<what>.<file>", as one table by name.
local function read_tables(path, metadata, what)
  local all = {}
  for key, text in pairs(metadata) do
    if key:find("^rille%." .. what .. "%.") then
      local ok, part = pcall(core.json_decode, text)
      if not ok or type(part) ~= "table" then
        fail("%s is damaged: its metadata %s are no JSON object", path, key)
      end
      for name, value in pairs(part) do
        if all[name] and core.json_encode { all[name] } ~= core.json_encode { value } then
          fail("%s is damaged: its files say different things of %s", path, name)
        end
        all[name] = value
      end
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

-- Refuses one file of a checkpoint that consists of several.
local function refuse_part(path, metadata)
  for key in pairs(metadata) do
    local number = key:match("^rille%.save%.(%d+)$")
    if number then
      local base, n = path:match("^(.*)%-%x+%-%d+%-of%-0*(%d+)%.safetensors$")
      local index = base and base .. ".safetensors.index.json"
      fail("%s is file %s%s of a checkpoint of several: it has only what one rank held\n    "
        .. "hint: %s", path, number, n and (" of the " .. n) or "",
        index and core.stat(index) and ("resume from %s, which names them all"):format(index)
          or "resume from the file *.safetensors.index.json that names them all")
    end
  end
end

-- Refuses an index whose files are not all of the save that wrote it, and one of those by itself.
local function check_parts(path, metadata)
  if not path:find("%.json$") then return refuse_part(path, metadata) end
  local token, files, n_files, n_parts = index_token(path), {}, 0, 0
  for _, name in pairs(read_object(path).weight_map) do
    if not files[name] then files[name], n_files = true, n_files + 1 end
  end
  for key, value in pairs(metadata) do
    if key:find("^rille%.save%.") and value == token then n_parts = n_parts + 1 end
  end
  if n_parts ~= n_files then
    fail("%s is damaged: of the %d files that it names, %d are of the save that wrote it", path,
      n_files, n_parts)
  end
end

-- Fails with all that does not fit this run, of what is stored.
local function check_fit(trainer, path, tensors, stored)
  local problems, known_names = {}, all_names(trainer)
  for _, entry in ipairs(tensors) do
    local there, dtype = stored[entry[1]], entry[2]:dtype()
    local want = table.concat(entry.shape, ", ")
    local have = there and table.concat(there.shape, ", ")
    if want ~= have or there.dtype ~= dtype then
      table.insert(problems, ("  %s %s[%s] %s"):format(entry[1], dtype, want,
        there and ("is %s[%s] in the file"):format(there.dtype, have) or "is missing"))
    end
  end
  for name in pairs(stored) do
    if not known_names[name] then table.insert(problems, "  " .. name .. " is not in this run") end
  end
  if #problems > 0 then
    table.sort(problems)
    fail("%s does not fit this run:\n%s", path, table.concat(problems, "\n"))
  end
end

-- This rank's tensors beside the file's: targets, values, and the values by name.
local function match(trainer, path, file)
  local targets, values, by_name = {}, {}, {}
  local tensors, metadata = all_tensors(trainer), file:metadata()
  local stored = pieces.stored(path, file, read_tables(path, metadata, "cut"))
  local digests = read_tables(path, metadata, "digests")
  local function value_of(name)
    local value = file:read(name)
    if digest_of(value) ~= digests[name] then
      fail("%s is damaged: the values of %s do not have the digest that was written with them",
        path, name)
    end
    return value
  end
  check_fit(trainer, path, tensors, stored)
  for _, entry in ipairs(tensors) do
    local name, target = entry[1], entry[2]
    local value = rille.no_grad(pieces.assemble, stored[name], value_of, { target:shape() },
      entry.cut, tp_rank_of(trainer))
    table.insert(targets, target)
    table.insert(values, value)
    by_name[name] = value
  end
  return targets, values, by_name
end

-- What there is to resume, on this rank: {path =, record =, targets =, values =, print = this
-- rank's part of the weights' fingerprint}.
local function read(trainer, path)
  path = locate(path)
  local file, l, optimizer = core.safetensors_open(path), trainer.layout, trainer.optimizer
  local found = { path = path, record = read_record(path, file:metadata()), print = 0 }
  check_parts(path, file:metadata())
  if found.record.optimizer ~= optimizer.name then
    fail("%s was written with the optimizer %s, this run has %s", path, found.record.optimizer,
      optimizer.name)
  end
  optimizer.steps_done = found.record.optimizer_steps -- decides which state there is
  local by_name
  found.targets, found.values, by_name = match(trainer, path, file)
  for _, p in ipairs(l.params) do
    if p.owner == l.rank and (p.cut or l:is_first_of_tp()) then
      found.print = found.print + core.fingerprint(p.tensor, by_name["model." .. p.name])
    end
  end
  file:close()
  return found
end

-- Refuses weights that together are not those of the record.
local function check_fingerprint(trainer, found)
  local PART <const>, mesh, sums = "<i8i8", trainer.layout.mesh, {}
  local mine = PART:pack(mesh:at("dp"), found.print)
  for _, text in ipairs(mesh:all():size() == 1 and { mine } or mesh:all():all_gather(mine)) do
    local replica, print = PART:unpack(text)
    sums[replica] = (sums[replica] or 0) + print
  end
  for _, sum in pairs(sums) do
    local have = ("%016x"):format(sum)
    if have ~= found.record.fingerprint then
      return ("%s is damaged: its weights have the fingerprint %s, those that were saved had %s")
        :format(found.path, have, found.record.fingerprint)
    end
  end
end

-- The checkpoints of the run that is resumed, oldest first, the one that it goes on from last: none
-- where that lies elsewhere than in this run's directory.
local function kept_before(trainer, path)
  local function plain(folder) return (folder:gsub("^%./", ""):gsub("/+$", "")) end
  local list = {}
  if not trainer.out or plain(folder_of(path)) ~= plain(trainer.out) then return list end
  local pointer = read_object(trainer.out .. "/" .. POINTER)
  local names = pointer and type(pointer.kept) == "table" and pointer.kept or {}
  table.insert(names, name_of(path))
  for i, name in ipairs(names) do
    local is_own = type(name) == "string" and name:find("^checkpoint%-%d+%.safetensors[%.%a]*$")
    if is_own and (i == #names or name ~= name_of(path)) then
      table.insert(list, trainer.out .. "/" .. name)
    end
  end
  return list
end

--- Brings a trainer to the state of a checkpoint, exactly, whatever layout wrote it. Every rank
--- calls it. Errors name what does not fit, or that the file is damaged; they are errors on all
--- ranks, and nothing has changed then.
function checkpoint.resume(trainer, path)
  expect("Trainer:resume", "path", path, "path")
  local optimizer = trainer.optimizer
  local steps_done = optimizer.steps_done
  local words, found = checkpoint.together(trainer.layout.mesh:all(), read, trainer, path)
  words = words or check_fingerprint(trainer, found)
  if words then
    optimizer.steps_done = steps_done
    error(words, 0)
  end
  rille.no_grad(function()
    for i, target in ipairs(found.targets) do target:copy_(found.values[i]) end
  end)
  local record = found.record
  trainer.step_count, trainer.samples_seen = record.step, record.samples_seen
  rille.random_state(record.random)
  trainer.checkpoints = kept_before(trainer, found.path)
  trainer.resumed = true
  return record.step
end

--- After each step of the loop: a checkpoint when one is due.
function checkpoint.when_due(trainer)
  local every = trainer.checkpoint_every
  if every > 0 and trainer.step_count % every == 0 then checkpoint.save(trainer) end
end

--- Somebody asked a rank to stop (signal: the name of what it got): a checkpoint, and the end.
function checkpoint.stop(trainer, metrics, signal)
  if trainer.out then checkpoint.save(trainer) end
  metrics:say(("%s: stopped after step %d%s"):format(signal, trainer.step_count,
    trainer.out and ", checkpoint written to " .. trainer.out or
    ", without a checkpoint (the trainer has no out directory)"))
  metrics:close()
  rille.exit(trainer.out and EXIT_STOPPED or 1)
end

return checkpoint
