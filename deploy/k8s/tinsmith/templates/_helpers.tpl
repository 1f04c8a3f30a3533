{{/* Names, labels and settings that several objects share. */}}

{{- define "tinsmith.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if gt (len $name) 20 -}}
{{- fail (printf "%q is too long to begin object names: set fullnameOverride to 20 characters or fewer" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* JSON list of the models: id, name, path, and the settings of their trainer and sampler. A key that the
     model sets replaces the default of that key, zero and false included (which sprig's merge would ignore); of an image,
     a budget and resources, each entry its own. */}}
{{- define "tinsmith.models" -}}
{{- $models := list -}}
{{- $ids := dict -}}
{{- $names := dict -}}
{{- range $model := .Values.models -}}
{{- $derived := regexReplaceAll "[^a-z0-9]+" ($model.name | splitList "/" | last | lower) "-" | trunc 23 | trimAll "-" -}}
{{- $id := $model.id | default $derived -}}
{{- if not $id -}}{{- fail (printf "model %q needs an id" $model.name) -}}{{- end -}}
{{- if hasKey $names $model.name -}}{{- fail (printf "model %q is listed twice" $model.name) -}}{{- end -}}
{{- if hasKey $ids $id -}}
{{- fail (printf "models %q and %q have the same id %q: set `id` of one of them" (get $ids $id) $model.name $id) -}}
{{- end -}}
{{- $_ := set $ids $id $model.name -}}
{{- $_ := set $names $model.name true -}}
{{- $one := dict "id" $id "name" $model.name "path" $model.path "revision" ($model.revision | default "") -}}
{{- if and $model.revision (or (hasPrefix "/" $model.path) (ne (len (splitList "/" $model.path)) 2)) -}}
{{- fail (printf "model %q: revision is of a Hugging Face repository, and path is %q" $model.name $model.path) -}}
{{- end -}}
{{- range $part := list "trainer" "sampler" -}}
{{- if hasKey (index $model $part | default dict) "serviceAccount" -}}
{{- fail (printf "model %q: all %ss have one serviceAccount: set %s.serviceAccount" $model.name $part $part) -}}
{{- end -}}
{{- $settings := deepCopy (index $.Values $part) -}}
{{- range $key, $value := index $model $part -}}
{{- if and (has $key (list "autoscaling" "image" "podDisruptionBudget" "resources")) (kindIs "map" $value) -}}
{{- $both := deepCopy (index $settings $key | default dict) -}}
{{- range $name, $own := $value -}}{{- $_ := set $both $name $own -}}{{- end -}}
{{- $_ := set $settings $key $both -}}
{{- else -}}
{{- $_ := set $settings $key $value -}}
{{- end -}}
{{- end -}}
{{- $_ := set $one $part $settings -}}
{{- end -}}
{{- if and (not $one.trainer.enabled) (eq ($one.sampler.replicas | int64) 0) -}}
{{- fail (printf "model %q is neither trained nor sampled: set trainer.enabled or sampler.replicas" $model.name) -}}
{{- end -}}
{{- $models = append $models $one -}}
{{- end -}}
{{- $models | toJson -}}
{{- end -}}

{{/* Argument of the gateways: the models that they wait for, also while these load for the first time. */}}
{{- define "tinsmith.baseModelArgs" -}}
{{- $known := list -}}
{{- range $model := include "tinsmith.models" . | fromJsonArray -}}
{{- $known = append $known (dict "name" $model.name "trained" $model.trainer.enabled "sampled" (gt ($model.sampler.replicas | int64) 0)) -}}
{{- end -}}
- {{ printf "--base-models=%s" ($known | toJson) | quote }}
{{- end -}}

{{/* Labels that select the pods of one component. Takes root, component and, for trainers and samplers, model; for
     trainers node, which is 0 in the pod that has rank 0. */}}
{{- define "tinsmith.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}{{ if .node }}-node{{ end }}
{{- with .model }}
tinsmith/model: {{ .id }}
{{- end }}
{{- with .node }}
tinsmith/node: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without versions, so that an upgrade restarts only pods whose own settings change. Takes the same
     and settings. */}}
{{- define "tinsmith.podLabels" -}}
{{ include "tinsmith.selector" . }}
{{- with .settings.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Annotations of pods. Takes root, settings, model and secrets: of ones own, whose change restarts the pods at the next
     upgrade. */}}
{{- define "tinsmith.podAnnotations" -}}
{{- $root := .root -}}
{{- $found := dict -}}
{{- with .model }}{{ $_ := set $found "tinsmith/base-model" .name }}{{ end -}}
{{- range $secret := .secrets -}}
{{- if $secret -}}
{{- with (lookup "v1" "Secret" $root.Release.Namespace $secret | default dict).data -}}
{{- $_ := set $found (printf "checksum/%s" ($secret | trunc 63 | trimAll ".-")) (toJson . | sha256sum) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found = merge $found (.settings.podAnnotations | default dict) -}}
{{- with $found }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* All labels of an object. Takes the same. */}}
{{- define "tinsmith.labels" -}}
{{ include "tinsmith.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Image of a component. Takes root, component and settings. */}}
{{- define "tinsmith.image" -}}
{{- $own := .settings.image -}}
{{- if $own.repository -}}
{{ $own.repository }}
{{- else -}}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
tinsmith-{{ .component }}
{{- end -}}
{{- if $own.digest -}}
@{{ $own.digest }}
{{- else -}}
:{{ $own.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Secret with the certificate of the gateways' public ports; "" = they speak in the clear. Takes the root. */}}
{{- define "tinsmith.publicTls" -}}
{{- if .Values.gateway.tls.existingSecret -}}
{{ .Values.gateway.tls.existingSecret }}
{{- else if .Values.gateway.tls.issuerRef -}}
{{ include "tinsmith.fullname" . }}-gateway-tls
{{- end -}}
{{- end -}}

{{/* Name of a component's service account. Takes root and component. */}}
{{- define "tinsmith.serviceAccount" -}}
{{- $own := (index .root.Values .component).serviceAccount -}}
{{- if $own.create -}}
{{- $own.name | default (printf "%s-%s" (include "tinsmith.fullname" .root) .component) -}}
{{- else -}}
{{- $own.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* A pod's spec but for its containers and volumes. Takes root, component, model, settings and grace: seconds until it is
     killed. */}}
{{- define "tinsmith.pod" -}}
serviceAccountName: {{ include "tinsmith.serviceAccount" . }}
automountServiceAccountToken: false
# A Service called "tinsmith" would set TINSMITH_PORT, which the services read as a flag.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace | int64 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- $security := deepCopy (.root.Values.podSecurityContext | default dict) }}
  {{- if eq .component "redis" }}
  {{- range list "runAsUser" "runAsGroup" "fsGroup" }}
  {{- if hasKey $security . }}{{ $_ := set $security . ($.settings.uid | int64) }}{{ end }}
  {{- end }}
  {{- end }}
  {{- toYaml $security | nindent 2 }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .settings.topologySpreadConstraints | nindent 2 }}
{{- else if has .component (list "gateway" "sampler") }}
# Replicas on nodes of their own, where there are several.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tinsmith.selector" . | nindent 8 }}
{{- end }}
{{- $first := dict "download" "" }}
{{- if and (has .component (list "trainer" "sampler")) .model.revision }}
{{- $_ := set $first "download" (include "tinsmith.download" .) }}
{{- end }}
{{- if or .settings.initContainers $first.download }}
initContainers:
  {{- with .settings.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $first.download }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with .settings.podSpec }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Secret and entry that hold a password of the bundled Redis. Takes root and entry. */}}
{{- define "tinsmith.redisPassword" -}}
secretKeyRef:
  name: {{ .root.Values.redis.existingSecret | default (printf "%s-redis" (include "tinsmith.fullname" .root)) }}
  key: {{ .entry }}
{{- end -}}

{{/* Environment of gateway, trainer and sampler. Takes root, component and settings. The kubelet puts the
     password into the URL, so that it is in Secrets alone. */}}
{{- define "tinsmith.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if .root.Values.redis.externalSecret }}
- name: TINSMITH_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.redis.externalSecret }}
      key: url
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    {{- include "tinsmith.redisPassword" (dict "root" .root "entry" .component) | nindent 4 }}
- name: TINSMITH_REDIS_URL
  value: redis://{{ .component }}:$(REDIS_PASSWORD)@{{ include "tinsmith.fullname" .root }}-redis:6379/0
{{- end }}
- name: TINSMITH_LOG_FORMAT
  value: {{ .root.Values.logs.format }}
- name: TINSMITH_ACCESS_LOG
  value: {{ ternary "yes" "no" .root.Values.logs.access | quote }}
# The root file system is read-only.
- name: HOME
  value: /tmp
{{- with .settings.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The shared volume. */}}
{{- define "tinsmith.dataClaim" -}}
{{- .Values.data.existingClaim | default (printf "%s-data" (include "tinsmith.fullname" .)) -}}
{{- end -}}

{{/* Argument of those who read or write checkpoints. Takes the root. */}}
{{- define "tinsmith.checkpointArgs" -}}
{{- with .Values.checkpoints.store }}
- --checkpoint-store={{ . }}
{{- end }}
{{- end -}}

{{/* Sources of a container's environment. Takes root, component and settings. */}}
{{- define "tinsmith.envFrom" -}}
{{- $sources := list -}}
{{- if and (has .component (list "gateway" "trainer")) .root.Values.checkpoints.existingSecret -}}
{{- if not .root.Values.checkpoints.store }}
{{- fail "checkpoints.existingSecret is for an object store: set checkpoints.store, or leave it out" }}
{{- end -}}
{{- $sources = append $sources (dict "secretRef" (dict "name" .root.Values.checkpoints.existingSecret)) -}}
{{- end -}}
{{- with concat $sources (.settings.extraEnvFrom | default list) }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What a user adds: arguments, mounts, volumes, and containers beside ours. Each takes settings. */}}
{{- define "tinsmith.extraArgs" -}}
{{- with .settings.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tinsmith.extraMounts" -}}
{{- with .settings.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tinsmith.extraVolumes" -}}
{{- with .settings.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tinsmith.extraContainers" -}}
{{- with .settings.extraContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A password kept from the live Secret, or made. Takes root, secret, entry and made. */}}
{{- define "tinsmith.keep" -}}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- index ($live.data | default dict) .entry | default (.made | b64enc) -}}
{{- end -}}

{{/* Argument and port of a pod's metrics. Take the root. */}}
{{- define "tinsmith.metricsArg" -}}
- --metrics-port={{ ternary (.Values.metrics.port | int64) 0 .Values.metrics.enabled }}
{{- end -}}

{{- define "tinsmith.metricsPort" -}}
{{- if .Values.metrics.enabled }}
- name: metrics
  containerPort: {{ .Values.metrics.port | int64 }}
{{- end }}
{{- end -}}

{{/* Who a process is to the others of the cluster: argument, mount and volume. Each takes root and component. */}}
{{- define "tinsmith.identityArg" -}}
{{- if .root.Values.mtls.enabled }}
- --identity=/etc/tinsmith-identity
{{- end }}
{{- end -}}

{{- define "tinsmith.identityMount" -}}
{{- if .root.Values.mtls.enabled }}
- name: identity
  mountPath: /etc/tinsmith-identity
  readOnly: true
{{- end }}
{{- end -}}

{{- define "tinsmith.identityVolume" -}}
{{- if .root.Values.mtls.enabled }}
- name: identity
  secret:
    secretName: {{ include "tinsmith.identitySecret" . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "tinsmith.identitySecret" -}}
{{- $own := index .root.Values.mtls.existingSecrets .component -}}
{{- if $own -}}
{{ $own }}
{{- else if .root.Values.mtls.issuerRef -}}
{{ printf "%s-%s-identity" (include "tinsmith.fullname" .root) .component }}
{{- else -}}
{{ fail (printf "mtls is enabled: set mtls.issuerRef, or mtls.existingSecrets.%s" .component) }}
{{- end -}}
{{- end -}}
